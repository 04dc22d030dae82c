"""Converts a GGUF file into a model folder in hub layout.

Knows the container; `gguf.config` translates keys, `gguf.tensors` tensors. Knows no cache: the caller gives the target
folder. Imports the gguf package, and numpy with it, only to read a file, since most starts read none.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.gguf.config import Metadata, hub_config
from workers.model.gguf.tensors import ROPE_FACTORS, Source, plan

if TYPE_CHECKING:
    import gguf

CONVERTER_VERSION = 1  # part of the cache key: increase it when the output changes
Progress = Callable[[str, int, int | None], None]
"""(description, done so far, total or None if unknown)"""


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write `source` into the existing folder `target`: config, weights, tokenizer.

    Raises `ModelError`: truncated file, unknown architecture or quantization, or an unsupported tensor or feature.
    """
    progress(f"reading {source.name}", 0, None)
    reader = open_gguf(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(axis) for axis in reversed(tensor.shape)) for name, tensor in tensors.items()}
    metadata = Metadata(source, _pairs(reader), shapes)
    factors = {name: tuple(tensors[name].data.astype(float).tolist()) for name in ROPE_FACTORS if name in tensors}
    config = hub_config(metadata, factors)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    try:
        description = read_model_config(target)
    except ModelError as error:
        raise ModelError(f"{source}: its metadata describe an unsupported model ({error})") from error
    sources = plan(source, metadata.architecture, tensors, description)
    _write_weights(target / "model.safetensors", sources, progress)
    progress("converting the tokenizer", 0, None)
    _write_tokenizer(source, target)


def open_gguf(source: Path) -> "gguf.GGUFReader":
    """Map the file and read its header, which takes seconds for a large vocabulary. Raises `ModelError`."""
    import gguf

    try:
        return gguf.GGUFReader(source)
    except FileNotFoundError:
        raise ModelError(f"{source} is missing") from None
    except (ValueError, LookupError, OSError) as error:
        # The reader slices the mapped file: a truncated one raises numpy's errors.
        raise ModelError(f"{source} is truncated or is no GGUF file ({error}); fetch it again") from error


def _pairs(reader: "gguf.GGUFReader") -> dict[str, Any]:
    """The metadata without the vocabulary: its lists take seconds to read, and only the tokenizer needs them."""
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.ggml.") or name.endswith("_token_id")
    }


def _write_weights(path: Path, sources: list[Source], progress: Progress) -> None:
    """A safetensors file in our order of tensors; the `safetensors` package would sort them by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for source in sources:
        stop = offset + 4 * math.prod(source.shape)
        header[source.name] = {"dtype": "F32", "shape": list(source.shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # numbers must be aligned to eight bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, source in enumerate(sources):
            progress("dequantizing", index, len(sources))
            file.write(source.numbers().tobytes())
    progress("dequantizing", len(sources), len(sources))


def _write_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer  # imports torch and takes five seconds: only when converting

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        tokenizer.save_pretrained(str(target))
    except Exception as error:  # the Rust code raises a bare Exception for an invalid vocabulary
        raise ModelError(f"{source}: its tokenizer cannot be converted ({error})") from error
