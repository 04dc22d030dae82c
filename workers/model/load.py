"""Weights from a model folder into a decoder.

Knows the hub's tensor names and how they are fused. On a CPU everything computes in float32 (half-precision matrix
products are nine times slower there without AVX-512 or AMX), and float32 checkpoints stay mapped from the file, so
that all processes of a machine share one copy.
"""

from pathlib import Path

import torch
from torch import Tensor

from workers.errors import ModelError
from workers.model.config import ModelConfig, read_model_config
from workers.model.folder import ModelFolder, TensorEntry, read_header, weight_files
from workers.model.llama import Layer, Llama
from workers.ops.attention import SDPA, Attention
from workers.ops.linear import Linear

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_llama(
    folder: ModelFolder,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention = SDPA,
) -> Llama:
    """The folder's model, ready to compute on `device` in `dtype` (float32 on a CPU whatever is asked).

    Raises `ModelError` when a tensor is missing or has the wrong shape.
    """
    config = read_model_config(folder.path)
    dtype = torch.float32 if device.type == "cpu" else dtype
    weights = _Weights(folder.path, device, dtype)
    embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tie_embeddings:
        head = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(weights, config, index) for index in range(config.num_layers))
    final_norm = weights.take("model.norm.weight", config.hidden_size)
    return Llama(config, embedding, layers, final_norm, Linear(head), attention)


def _layer(weights: "_Weights", config: ModelConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    hidden, ffn = config.hidden_size, config.ffn_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(parts: dict[str, int], columns: int, bias: bool) -> Linear:
        weight = fuse([weights.take(f"{prefix}.{part}.weight", rows, columns) for part, rows in parts.items()])
        if not bias:
            return Linear(weight)
        return Linear(weight, fuse([weights.take(f"{prefix}.{part}.bias", rows) for part, rows in parts.items()]))

    attention = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    return Layer(
        attention_norm=weights.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=linear(attention, hidden, config.attention_bias),
        output=linear({"self_attn.o_proj": hidden}, query, config.attention_bias),
        ffn_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=linear({"mlp.gate_proj": ffn, "mlp.up_proj": ffn}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, ffn, config.mlp_bias),
    )


def fuse(parts: list[Tensor]) -> Tensor:
    """The tensors above one another. Neighbours in one mapped file become one view: nothing is copied."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.data_ptr() != end:
            return torch.cat(parts)
        end += part.nbytes
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())


class _Weights:
    """The safetensors files of one folder, mapped whole: a tensor is a view until it must change dtype or device."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._path = path
        self._device = device
        self._dtype = dtype
        self._tensors: dict[str, tuple[Tensor, TensorEntry]] = {}
        for file in weight_files(path):
            entries = read_header(file)
            mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
            self._tensors.update({entry.name: (mapped, entry) for entry in entries})

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"{self._path}: the weights lack {name}")
        mapped, entry = self._tensors[name]
        if entry.shape != shape:
            raise ModelError(f"{self._path}: {name} has shape {list(entry.shape)}, config.json says {list(shape)}")
        if entry.dtype not in DTYPES:
            raise ModelError(f"{self._path}: {name} is of dtype {entry.dtype}; known are {', '.join(DTYPES)}")
        dtype = DTYPES[entry.dtype]
        numbers = mapped[entry.start : entry.start + entry.num_bytes]
        if entry.start % dtype.itemsize:  # legal, though no common writer does it: views need alignment
            numbers = numbers.clone()
        return numbers.view(dtype).view(shape).to(self._device, self._dtype)
