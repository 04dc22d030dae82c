"""One small random model for each family and each of its quirks, written to disk by transformers itself.

Shapes are odd on purpose: heads wider than hidden / heads, one KV head, windows shorter than the prompts.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from tests.model.tiny import write_tiny_tokenizer

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
PARTIAL = {**LONGROPE, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.0, 2.0, 4.0]}
GEMMA3 = {
    "num_hidden_layers": 7,
    "sliding_window": 9,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 20.0,
}
NO_CAP = {**GEMMA3, "final_logit_softcapping": None}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EYE_TOKENS = {"mm_tokens_per_image": 4, "image_token_index": 310, "boi_token_index": 311, "eoi_token_index": 312}
GPT_OSS = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "sliding_window": 9,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
LLAMA4 = {
    "num_hidden_layers": 5,
    "head_dim": 12,
    "attention_chunk_size": 7,
    "floor_scale": 3,
    "attn_scale": 0.4,
    "intermediate_size_mlp": 40,
    "num_local_experts": 5,
}
HYBRID = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,  # of outputs near zero, which it divides by its root
}
DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA4_EYES = {**EYES, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 12, "tie_word_embeddings": True}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.1}}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral, window": ("mistral", {"sliding_window": 7, "head_dim": 16, "num_key_value_heads": 1}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen 2": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen 2, upper windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen 3": ("qwen3", {"head_dim": 24}),
    "gemma 2": (
        "gemma2",
        {"sliding_window": 7, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0},
    ),
    "gemma 2, no caps": (
        "gemma2",
        {"sliding_window": 7, "head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma 3": ("gemma3_text", GEMMA3),
    "gemma 3, scaled rope": ("gemma3_text", {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma 3 with eyes": ("gemma3", {"text_config": SIZES | NO_CAP, "vision_config": EYES, **EYE_TOKENS}),
    "phi 3, short": ("phi3", {"rope_parameters": LONGROPE, "sliding_window": 11}),
    "phi 3, long": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4, "head_dim": 8}),
    "phi 3, partial rotary": ("phi3", {"rope_parameters": PARTIAL, "tie_word_embeddings": True}),
    "phi 3, default rope": ("phi3", {"tie_word_embeddings": True}),
    "smollm 3": ("smollm3", {"num_hidden_layers": 5}),
    "llama 4": ("llama4_text", {**LLAMA4, "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}),
    "llama 4, some dense": (
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "no_rope_layers": [0, 1, 1, 0, 1],
            "layer_types": [*["chunked_attention", "full_attention"] * 2, "chunked_attention"],
        },
    ),
    "llama 4, all dense": ("llama4_text", {**LLAMA4, "moe_layers": [], "attention_bias": True}),
    "llama 4 with eyes": ("llama4", {"text_config": SIZES | LLAMA4, "vision_config": LLAMA4_EYES}),
    "deepseek 2": ("deepseek_v2", {**DEEPSEEK, "rms_norm_eps": 1e-4}),
    "deepseek 2, no query latent": (
        "deepseek_v2",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "rope_parameters": DEEPSEEK_YARN,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek 3": ("deepseek_v3", {**DEEPSEEK, "rope_parameters": DEEPSEEK_YARN, "n_group": 4, "topk_group": 2}),
    "deepseek 3, no groups": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek 3, all dense": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 3},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen 2 moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen 3 moe": ("qwen3_moe", {**EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "qwen 3 moe, some dense": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}),
    "qwen 3 next": ("qwen3_next", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen 3.5": (
        "qwen3_5_text",
        {
            **HYBRID,
            "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen 3.5 moe with eyes, stacked": (
        "qwen3_5_moe",
        {
            "text_config": SIZES | HYBRID | EXPERTS | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 40},
            "vision_config": {
                **EYES,
                "depth": 1,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
            },
        },
    ),
    "gpt oss": ("gpt_oss", GPT_OSS),
    "gpt oss, mxfp4": ("gpt_oss", {**GPT_OSS, "num_experts_per_tok": 5}),  # all: no rounding chooses others
    "qwen 3, biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}),
}


def write_family(folder: Path, name: str, seed: int = 0, **others: Any) -> Path:
    """The family's model with weights, config and a byte-level tokenizer; `others`: of the config."""
    model_type, changes = FAMILIES[name]
    sizes = {} if "text_config" in changes else SIZES
    config = AutoConfig.for_model(model_type, **(sizes | changes | others))
    model = _maker(config).from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if label.endswith("A_log"):  # drawn by transformers; slow decay, so that the state is not of the last token
                parameter.copy_(noise - 3)
            elif parameter.dim() == 1:  # norms and biases: as they come, and something on top
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for part, buffer in model.named_buffers():
            if part.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    if "mxfp4" in name:
        _pack_experts(folder)
    if "stacked" in name:
        _stack_experts(folder)
    write_tiny_tokenizer(folder)
    return folder


def _stack_experts(folder: Path) -> None:
    """One tensor for all experts of a layer, as in Qwen's own checkpoints of this family."""
    tensors = load_file(folder / "model.safetensors")
    for first in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        base, parts = first.removesuffix(".0.gate_proj.weight"), ("gate_proj", "up_proj", "down_proj")
        each = [
            [tensors.pop(f"{base}.{expert}.{part}.weight") for part in parts]
            for expert in range(EXPERTS["num_experts"])
        ]
        tensors[f"{base}.gate_up_proj"] = torch.stack([torch.cat(three[:2]) for three in each])
        tensors[f"{base}.down_proj"] = torch.stack([three[2] for three in each])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _pack_experts(folder: Path) -> None:
    """Rounds the experts to MXFP4 blocks."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = _packed(tensors.pop(name).float().transpose(1, 2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def _packed(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of numbers [..., columns], as in the Open Compute Project's Microscaling Formats 1.0."""
    blocks = numbers.unflatten(-1, (-1, 32))
    powers = blocks.abs().amax(-1).log2().floor() - 2
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = blocks / powers.exp2()[..., None]
    codes = (scaled.abs()[..., None] - sizes).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).byte(), (powers + 127).byte()


def reference(folder: Path) -> PreTrainedModel:
    """transformers' own computation of the folder, in float32 and with attention written out."""
    packed = "mxfp4" in (folder / "config.json").read_text()
    model: PreTrainedModel = _maker(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True) if packed else None,
    )
    return model.eval()


def _maker(config: Any) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
