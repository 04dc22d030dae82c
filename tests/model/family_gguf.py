"""A folder in hub layout as a GGUF file, the way llama.cpp's converter writes it. The `gguf` package has the names."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.model.tiny_gguf import add_tokenizer, interleave
from workers.ops.linear.blocks import BLOCK_COLUMNS, KINDS, quantize

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
}
Numbers = NDArray[np.float32]


def write_family_gguf(
    folder: Path, path: Path, weight_format: str = "", others: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """The folder's model as the file `path`; matrices in blocks of `weight_format` where their rows allow it.

    `others`: formats of single parts, by their GGUF names. The empty format is float32.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_metadata(writer, config)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    padding = [f"<pad{index}>" for index in range(config["vocab_size"] - 2 - len(alphabet))]
    add_tokenizer(writer, ["<|im_start|>", "<|im_end|>", *alphabet, *padding])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, numbers in _stacked(load_file(folder / "model.safetensors")).items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        numbers = _changed(name, numbers, config, architecture)
        kind = others.get(ours.split(".")[-2], weight_format)
        if kind and numbers.ndim > 1 and numbers.shape[-1] % BLOCK_COLUMNS[kind] == 0:
            blocks = quantize(torch.from_numpy(numbers).flatten(0, -2), kind).unflatten(0, numbers.shape[:-1])
            writer.add_tensor(ours, blocks.numpy(), raw_dtype=KINDS[kind])
        else:
            writer.add_tensor(ours, numbers)
    for name, factors in _rope_factors(folder, config["rope_parameters"]).items():
        writer.add_tensor(f"{name}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            stretch = max(1.0, config["max_position_embeddings"] / original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(name):
            add(config[name])
    if "query_pre_attn_scalar" in config:
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _rope_factors(folder: Path, rope: dict[str, Any]) -> dict[str, list[float]]:
    """The divisors of frequencies that the file has as tensors."""
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{length}": rope[f"{length}_factor"] for length in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    config = AutoConfig.from_pretrained(folder)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** -(2 * torch.arange(len(stretched)) / (2 * len(stretched)))
    return {"rope_freqs": (plain / stretched).tolist()}


def _stacked(tensors: dict[str, Numbers]) -> dict[str, Numbers]:
    """The experts' matrices of a layer as one, under the name that llama.cpp's converter gives it."""
    whole: dict[str, Numbers] = {}
    experts: dict[str, dict[int, Numbers]] = {}
    for name, numbers in tensors.items():
        before, found, after = name.partition(".experts.")
        if not found:
            whole[name] = numbers
            continue
        expert, part = after.split(".", 1)
        experts.setdefault(f"{before}.experts.{part}", {})[int(expert)] = numbers
    stacks = {name: np.stack([parts[index] for index in range(len(parts))]) for name, parts in experts.items()}
    return whole | stacks


def _changed(name: str, numbers: Numbers, config: dict[str, Any], architecture: gguf.MODEL_ARCH) -> Numbers:
    if architecture in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3):
        if "q_proj" in name:
            return interleave(numbers, config["num_attention_heads"])
        if "k_proj" in name:
            return interleave(numbers, config["num_key_value_heads"])
    if architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
        return numbers + 1
    return numbers.reshape([axis for axis in numbers.shape if axis != 1])
