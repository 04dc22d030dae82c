"""A model folder in hub layout, and the headers of its safetensors files.

Knows file names, sizes and headers; checks that the weights are complete before they are mapped. Knows no torch: the
format is eight bytes of header length, the header in JSON, then the numbers.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.description import NO_OPINION, GenerationDefaults, ModelConfig
from workers.model.fields import read_fields
from workers.model.tensors import FP8_BLOCK, FP8_SCALES, is_ignored, tensor_shapes

WEIGHT_DTYPES = ("F32", "BF16", "F16")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
_POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with config.json, safetensors weights (single or sharded) and a tokenizer. `name`: as requested.

    `recommended`: sampling defaults known for the name; the folder's own generation_config.json takes precedence.
    """

    name: str
    path: Path
    recommended: GenerationDefaults = NO_OPINION


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a safetensors file; `start` is its byte offset in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def check_folder(folder: ModelFolder) -> None:
    """Raise `ModelError` unless the folder is complete and has a known architecture."""
    if not folder.path.is_dir():
        raise ModelError(f"{folder.path} is not a folder")
    config = read_model_config(folder.path)
    if not (folder.path / "tokenizer.json").is_file():
        raise ModelError(f"{folder.path} has no tokenizer.json; save the model's fast tokenizer there")
    check_tensors(folder.path, config)


def check_tensors(path: Path, config: ModelConfig) -> None:
    """Raise `ModelError` unless the headers list exactly the tensors that the model needs, in a supported dtype."""
    entries = {
        each.name: each
        for file in weight_files(path)
        for entry in read_header(file)
        for each in parts_of(entry, config)
    }
    shapes = tensor_shapes(config)
    missing = [name for name in shapes if name not in entries]
    if missing:
        raise ModelError(f"{path}: the weights lack {missing[0]} (one of {len(missing)} tensors)")
    for name, shape in shapes.items():
        entry = entries[name]
        dtypes = ("U8",) if name.endswith(("_blocks", "_scales")) else WEIGHT_DTYPES
        if entry.dtype == "F8_E4M3" and "U8" not in dtypes:
            _check_fp8(path, entry, entries.get(name + FP8_SCALES))
        elif entry.dtype not in dtypes:
            known = ", ".join(dtypes) if "U8" in dtypes else f"{', '.join(dtypes)}, or a GGUF file"
            raise ModelError(f"{path}: {name} is of dtype {entry.dtype}; supported: {known}")
        if entry.shape != shape:
            raise ModelError(f"{path}: {name} has shape {list(entry.shape)}, config.json says {list(shape)}")
    known_names = {*shapes, *(name + FP8_SCALES for name in shapes if entries[name].dtype == "F8_E4M3")}
    unknown = sorted(name for name in entries if name not in known_names and not is_ignored(config, name))
    if unknown:
        raise ModelError(
            f"{path}: tensor {unknown[0]} (one of {len(unknown)}) is not part of {config.architecture} "
            "as config.json describes it"
        )


def _check_fp8(path: Path, entry: TensorEntry, scales: TensorEntry | None) -> None:
    """Raise `ModelError` unless each block of the tensor has a scale."""
    wanted = tuple(-(-size // FP8_BLOCK) for size in entry.shape)
    if scales is None or scales.dtype not in WEIGHT_DTYPES or scales.shape != wanted or len(wanted) != 2:
        found = "there is none" if scales is None else f"its shape is {list(scales.shape)} of {scales.dtype}"
        raise ModelError(
            f"{path}: {entry.name} is of dtype F8_E4M3 and needs {entry.name}{FP8_SCALES} of shape {list(wanted)}, "
            f"a scale for each {FP8_BLOCK} x {FP8_BLOCK} numbers, but {found}"
        )


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, sorted by name. Raises `ModelError` if one is missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = read_fields(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"{index} has no weight_map of file names")
        files = tuple(path / name for name in sorted(set(shards.values())))
    else:
        files = (path / "model.safetensors",)
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing: the folder has no complete safetensors weights")
    return files


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors file, checked against its size: a truncated file raises `ModelError`."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or length > file_bytes - 8:
            raise ModelError(f"{path} is truncated or is no safetensors file ({file_bytes} bytes); fetch it again")
        try:
            header = json.loads(file.read(length))
            entries = tuple(
                _entry(name, fields, base=8 + length) for name, fields in header.items() if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} has a damaged safetensors header ({error}); fetch it again") from error
    wanted_bytes = max((entry.start + entry.num_bytes for entry in entries), default=8 + length)
    if file_bytes < wanted_bytes:
        raise ModelError(f"{path} is truncated: {file_bytes} bytes of {wanted_bytes}; fetch it again")
    return entries


def parts_of(entry: TensorEntry, config: ModelConfig) -> tuple[TensorEntry, ...]:
    """The entry itself; of a tensor with the matrices [out, in] of all experts, those of each expert.

    Some Qwen checkpoints store experts one by one, others of the same architecture stack them.
    """
    names, experts = config.names, config.experts
    base, _, last = entry.name.rpartition(".")
    heights = {"gate_up_proj": names.expert_gate_up, "down_proj": (names.expert_down,)}.get(last, ())
    if (
        experts is None
        or experts.stacked
        or len(entry.shape) != 3
        or not base.endswith(f".{names.experts}")
        or not heights
    ):
        return (entry,)
    shape = (entry.shape[1] // len(heights), entry.shape[2])
    num_bytes = entry.num_bytes // (entry.shape[0] * len(heights))
    labels = [f"{base}.{expert}.{name}.weight" for expert in range(entry.shape[0]) for name in heights]
    starts = range(entry.start, entry.start + entry.num_bytes, num_bytes)
    return tuple(
        replace(entry, name=label, shape=shape, start=start, num_bytes=num_bytes)
        for label, start in zip(labels, starts, strict=True)
    )


def count_parameters(folder: ModelFolder) -> int:
    """Number of parameters; a tied head counts once."""
    config = read_model_config(folder.path)
    if config.experts:  # two numbers of MXFP4 share a byte
        config = replace(config, experts=replace(config.experts, mxfp4=False))
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def tokenizer_id(folder: ModelFolder) -> str:
    """A short id of the tokenizer: workers with different tokenizers must not exchange tokens."""
    return hashlib.sha256((folder.path / "tokenizer.json").read_bytes()).hexdigest()[:16]


def read_pooling(folder: Path) -> str:
    """How an embedding model in the layout of Sentence Transformers pools: "mean" or "last"; empty: it is none, or it
    pools otherwise.
    """
    try:
        config = json.loads((folder / "1_Pooling" / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    found = [mode for name, mode in _POOLING.items() if isinstance(config, dict) and config.get(name) is True]
    return found[0] if len(found) == 1 else ""


def _entry(name: str, fields: dict[str, Any], base: int) -> TensorEntry:
    start, stop = fields["data_offsets"]
    shape = tuple(fields["shape"])
    num_bytes = math.prod(shape) * _DTYPE_BYTES.get(fields["dtype"], 0)
    if start < 0 or (num_bytes and stop - start != num_bytes):
        raise ValueError(f"{name} spans bytes {start} to {stop}, its shape needs {num_bytes}")
    return TensorEntry(name, fields["dtype"], shape, base + start, stop - start)
