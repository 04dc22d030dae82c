"""A Llama-family GGUF file turned, once, into a model folder in hub layout.

Knows GGUF's key and tensor names and that it stores q and k with each head's rows interleaved. Knows no cache:
the caller names the target folder. Numbers are dequantised to float32, tensor by tensor, never all at once.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from workers.errors import ModelError

CONVERTER_VERSION = 1  # part of the cache key: raise it whenever the output changes
KNOWN = ("llama",)
Progress = Callable[[str, int, int | None], None]
"""(what is going on, done so far, total or None when unknown)"""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# In the order in which they are written: what is fused at load stands side by side, and is then mapped, not copied.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to write: its hub name, its shape, and for q and k the number of heads to disentangle (else 0)."""

    name: str
    shape: tuple[int, ...]
    heads: int
    source: gguf.ReaderTensor


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write `source` into the existing folder `target`: config, weights, tokenizer.

    Raises `ModelError`: truncated file, unknown architecture, a tensor or feature that the decoder lacks.
    """
    progress(f"reading {source.name}", 0, None)
    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.")}
    architecture = fields.get("general.architecture")
    if architecture not in KNOWN:
        raise ModelError(f"{source}: GGUF architecture {architecture!r} is unknown; known are {', '.join(KNOWN)}")
    config = _config(source, reader, fields)
    tensors = _plan(source, reader, config)
    _write_weights(target / "model.safetensors", tensors, progress)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    progress("converting the tokenizer", 0, None)
    _write_tokenizer(source, target)


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except FileNotFoundError:
        raise ModelError(f"{source} is missing") from None
    except (ValueError, LookupError, OSError) as error:
        # The reader maps the file and slices it: a short file shows as whatever numpy says about the slice.
        raise ModelError(f"{source} is truncated or is no GGUF file ({error}); fetch it again") from error


def _config(source: Path, reader: gguf.GGUFReader, fields: dict[str, Any]) -> dict[str, Any]:
    def need(name: str) -> Any:
        if f"llama.{name}" not in fields:
            raise ModelError(f"{source}: the GGUF metadata lack llama.{name}")
        return fields[f"llama.{name}"]

    def token(name: str) -> int | None:
        field = reader.get_field(f"tokenizer.ggml.{name}_token_id")
        return None if field is None else int(field.contents())

    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    shapes = {tensor.name: [int(axis) for axis in tensor.shape] for tensor in reader.tensors}
    ends = sorted({end for end in (token("eos"), token("eot")) if end is not None})
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes.get("token_embd.weight", [0, 0])[1],  # GGUF lists the fastest axis first
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(need("context_length")),
        # Stored as float32: seven digits give back the number that was meant.
        "rms_norm_eps": float(f"{need('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_parameters": _rope(source, fields),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "dtype": "float32",
    }


def _rope(source: Path, fields: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0))}
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": float(fields["llama.rope.scaling.factor"])}
    if kind != "none":
        raise ModelError(f"{source}: rope scaling {kind!r} in a GGUF is not supported; use the safetensors checkpoint")
    return rope


def _plan(source: Path, reader: gguf.GGUFReader, config: dict[str, Any]) -> list[_Tensor]:
    """What to write, in order. A tensor that we have no place for is a model that we cannot compute."""
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    names = dict(_TOP)
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{ours}.weight": f"model.layers.{layer}.{hub}.weight" for ours, hub in _LAYER.items()}
    unknown = sorted(set(by_name) - set(names))
    if unknown:
        raise ModelError(f"{source}: tensor {unknown[0]} (one of {len(unknown)}) is not part of a plain Llama")
    missing = sorted(set(names) - set(by_name) - {"output.weight"})
    if missing:
        raise ModelError(f"{source}: tensor {missing[0]} (one of {len(missing)}) is missing")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return [
        _Tensor(
            name=hub,
            shape=tuple(int(axis) for axis in reversed(by_name[ours].shape)),
            heads=heads.get(ours.split(".")[-2], 0),
            source=by_name[ours],
        )
        for ours, hub in names.items()
        if ours in by_name
    ]


def _write_weights(path: Path, tensors: list[_Tensor], progress: Progress) -> None:
    """A safetensors file in our own order of tensors, which the `safetensors` package would sort by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        stop = offset + 4 * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # numbers must start on a multiple of eight
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, tensor in enumerate(tensors):
            progress("dequantising", index, len(tensors))
            file.write(_numbers(tensor).tobytes())
    progress("dequantising", len(tensors), len(tensors))


def _numbers(tensor: _Tensor) -> NDArray[np.float32]:
    numbers = gguf.quants.dequantize(tensor.source.data, tensor.source.tensor_type)
    numbers = np.ascontiguousarray(numbers, dtype=np.float32).reshape(tensor.shape)
    if not tensor.heads:
        return numbers
    # Rotary pairs: llama.cpp turns rows (0, 1), (2, 3), ... of a head, the hub's models turn (i, i + head_dim / 2).
    rows, columns = tensor.shape
    pairs = numbers.reshape(tensor.heads, rows // tensor.heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _write_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer  # five seconds and all of torch: only a conversion pays for it

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        tokenizer.save_pretrained(str(target))
    except Exception as error:  # the Rust side raises bare Exception for a vocabulary that it rejects
        raise ModelError(f"{source}: its tokenizer cannot be converted ({error})") from error
