"""Maps the tensors of a GGUF file to those of a hub checkpoint, and undoes llama.cpp's changes.

Knows llama.cpp's names and its three changes: interleaved rotary pairs in some architectures, norm weights with the
offset added, stacked experts. Dequantizes to float32 one tensor at a time, and imports the gguf package
and numpy only for that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.errors import ModelError
from workers.model.description import LayerConfig, ModelConfig
from workers.model.tensors import tensor_shapes

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from numpy.typing import NDArray

# Here the two numbers of a rotary pair are adjacent; in the others they are half a head apart, as in the hub.
_INTERLEAVED = ("llama", "smollm3")
# Not weights: they go into the config.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one hub tensor. `expert`: its index in a stack; `heads`: heads to de-interleave, or 0."""

    tensor: "gguf.ReaderTensor"
    name: str  # the hub's
    shape: tuple[int, ...]
    expert: int | None
    heads: int
    offset: float  # that llama.cpp added

    def stored(self) -> "NDArray[Any]":
        """The bytes in the file."""
        data: NDArray[Any] = self.tensor.data if self.expert is None else self.tensor.data[self.expert]
        return data

    def numbers(self) -> "NDArray[np.float32]":
        import gguf
        import numpy as np

        numbers = gguf.quants.dequantize(self.stored(), self.tensor.tensor_type)
        numbers = np.ascontiguousarray(numbers, dtype=np.float32).reshape(self.shape)
        if not self.heads:
            return numbers - np.float32(self.offset) if self.offset else numbers
        # Rows (0, 1), (2, 3), ... of a head become (i, i + head_dim / 2).
        pairs = numbers.reshape(self.heads, self.shape[0] // self.heads // 2, 2, *self.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(self.shape)


def plan(
    source: Path, architecture: str, tensors: "Mapping[str, gguf.ReaderTensor]", config: ModelConfig
) -> list[Source]:
    """The tensors to write, in order. Raises `ModelError` for a missing, unknown or invalid tensor."""
    places = dict(_places(config))
    interleaved = architecture in _INTERLEAVED
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if interleaved else {}
    wanted = {places[name][0] for name in tensor_shapes(config)}
    missing = sorted(wanted - set(tensors))
    if missing:
        raise ModelError(f"{source}: tensor {missing[0]} (one of {len(missing)}) is missing")
    unknown = sorted(set(tensors) - wanted - set(ROPE_FACTORS))
    if unknown:
        raise ModelError(
            f"{source}: tensor {unknown[0]} (one of {len(unknown)}) is not part of a plain {config.architecture}"
        )
    sources = []
    for name, shape in tensor_shapes(config).items():
        ours, expert = places[name]
        part = ours.split(".")[-2]
        _check(source, tensors[ours], shape, expert, config)
        offset = config.norm_offset if part.endswith("_norm") else 0.0
        sources.append(Source(tensors[ours], name, shape, expert, heads.get(part, 0), offset))
    return sources


def _check(
    source: Path, tensor: "gguf.ReaderTensor", shape: tuple[int, ...], expert: int | None, config: ModelConfig
) -> None:
    found = tuple(int(axis) for axis in reversed(tensor.shape))  # GGUF lists the fastest axis first
    assert config.experts is not None or expert is None
    wanted = shape if expert is None or config.experts is None else (config.experts.count, *shape)
    if _squeezed(found) != _squeezed(wanted):
        raise ModelError(f"{source}: tensor {tensor.name} has shape {list(found)}, the metadata say {list(wanted)}")
    if not _can_dequantize(tensor.tensor_type):
        import gguf

        known = ", ".join(kind.name for kind in gguf.GGMLQuantizationType if _can_dequantize(kind))
        raise ModelError(
            f"{source}: tensor {tensor.name} is quantized as {tensor.tensor_type.name}, which is not supported; "
            f"supported: {known}"
        )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in shape if axis != 1)  # llama.cpp's converter drops axes of one


def _can_dequantize(kind: "gguf.GGMLQuantizationType") -> bool:
    import gguf
    import numpy as np

    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


def _places(config: ModelConfig) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """(hub name, (GGUF name, index in its stack)) of all tensors that the model may have."""
    names = config.names
    yield f"{names.root}.embed_tokens.weight", ("token_embd.weight", None)
    yield f"{names.root}.norm.weight", ("output_norm.weight", None)
    yield f"{names.head}.weight", ("output.weight", None)
    for index, layer in enumerate(config.layers):
        for hub, ours, expert in _layer(config, layer):
            for kind in ("weight", "bias"):
                yield f"{names.root}.layers.{index}.{hub}.{kind}", (f"blk.{index}.{ours}.{kind}", expert)


def _layer(config: ModelConfig, layer: LayerConfig) -> Iterator[tuple[str, str, int | None]]:
    names = config.names
    yield names.attention_norm, "attn_norm", None
    fused = len(names.qkv) == 1
    for hub, ours in zip(names.qkv, ["attn_qkv"] if fused else ["attn_q", "attn_k", "attn_v"], strict=True):
        yield hub, ours, None
    yield names.query_norm, "attn_q_norm", None
    yield names.key_norm, "attn_k_norm", None
    yield names.output, "attn_output", None
    yield names.attention_post_norm, "post_attention_norm", None
    yield names.ffn_norm, "ffn_norm", None
    yield names.ffn_post_norm, "post_ffw_norm", None
    gate_up = ["ffn_gate", "ffn_up"]
    if not layer.has_experts:
        for hub, ours in zip(names.gate_up, gate_up[-len(names.gate_up) :], strict=True):
            yield hub, ours, None
        yield names.down, "ffn_down", None
        return
    assert config.experts is not None
    yield names.router, "ffn_gate_inp", None
    yield names.shared_gate, "ffn_gate_inp_shexp", None
    for part, ours in zip((*names.expert_gate_up, names.expert_down), [*gate_up, "ffn_down"], strict=True):
        yield f"{names.shared_expert}.{part}", f"{ours}_shexp", None
        for expert in range(config.experts.count):
            yield f"{names.experts}.{expert}.{part}", f"{ours}_exps", expert
