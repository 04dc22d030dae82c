"""A Llama of a known shape with random weights as a model folder, for workers in processes of their own."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.llama import LlamaShape

LLAMA_1B = LlamaShape(16, 2048, 8192, 32, 8, 64, 128256)  # Llama 3.2 1B


def write_model(folder: Path, shape: LlamaShape, device: torch.device, dtype: torch.dtype, context: int) -> Path:
    """Weights are drawn on `device`. Head and embedding are one tensor."""
    from tests.model.tiny import write_tiny_tokenizer

    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int, deviation: float) -> Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, deviation, generator=generator).cpu()

    hidden, query, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ones = torch.ones(hidden, dtype=dtype)
    tensors = {"model.embed_tokens.weight": draw(shape.vocab, hidden, 1.0), "model.norm.weight": ones}
    for layer in range(shape.layers):
        sizes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (shape.ffn, hidden),
            "mlp.up_proj": (shape.ffn, hidden),
            "mlp.down_proj": (hidden, shape.ffn),
        }
        for name, (rows, columns) in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(rows, columns, columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones.clone()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(folder)
    return folder
