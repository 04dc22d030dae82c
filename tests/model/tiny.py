"""A small random Llama on disk: config, weights, a byte-level tokenizer with a chat template. For all tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2


def write_tiny_llama(
    folder: Path,
    *,
    num_layers: int = 2,
    hidden_size: int = 32,
    ffn_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    vocab_size: int = 320,
    context_length: int = 512,
    tie_embeddings: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """Write the model and return `folder`. The vocabulary holds 256 bytes and 3 special tokens: at least 259."""
    assert vocab_size >= 256 + len(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie_embeddings,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    _write_weights(folder, config, dtype, shards, seed)
    write_tiny_tokenizer(folder)
    return folder


def _write_weights(folder: Path, config: dict[str, Any], dtype: torch.dtype, shards: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

    tensors = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden) * hidden**0.5}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        for name, rows, columns, bias in (
            ("self_attn.q_proj", query, hidden, config["attention_bias"]),
            ("self_attn.k_proj", kv, hidden, config["attention_bias"]),
            ("self_attn.v_proj", kv, hidden, config["attention_bias"]),
            ("self_attn.o_proj", hidden, query, config["attention_bias"]),
            ("mlp.gate_proj", ffn, hidden, config["mlp_bias"]),
            ("mlp.up_proj", ffn, hidden, config["mlp_bias"]),
            ("mlp.down_proj", hidden, ffn, config["mlp_bias"]),
        ):
            tensors[f"{prefix}.{name}.weight"] = draw(rows, columns)
            if bias:
                tensors[f"{prefix}.{name}.bias"] = draw(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + 0.1 * draw(hidden)
    tensors["model.norm.weight"] = 1 + 0.1 * draw(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw(config["vocab_size"], hidden)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        part = dict(list(tensors.items())[shard::shards])
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 259 ids with a chat template."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[EOS],
        "bos_token": SPECIAL[1],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
