"""The record of which GGUF file a folder was converted from, and where in that file each tensor is.

One JSON file next to config.json. Knows no cache and no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.model.config import read_model_config
from workers.model.gguf.file import open_gguf
from workers.model.gguf.tensors import plan

_RECORD = "gguf.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in the file, from byte `start` on. `heads`: number of heads with interleaved rotary pairs."""

    weight_format: str  # llama.cpp's, in lower case
    start: int
    num_bytes: int
    heads: int


@dataclass(frozen=True, slots=True)
class Origin:
    path: Path
    sha256: str
    num_bytes: int
    tensors: Mapping[str, Stored]  # by the hub's names


def find_origin(gguf: Path, sha256: str, folder: Path) -> Origin:
    """The record for `folder`, which was converted from `gguf`."""
    reader = open_gguf(gguf)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = str(reader.fields["general.architecture"].contents())
    sources = plan(gguf, architecture, tensors, read_model_config(folder))
    stored = {}
    for source in sources:
        num_bytes = source.stored().nbytes
        start = int(source.tensor.data_offset) + num_bytes * (source.expert or 0)
        stored[source.name] = Stored(source.tensor.tensor_type.name.lower(), start, num_bytes, source.heads)
    return Origin(gguf, sha256, gguf.stat().st_size, stored)


def write_origin(origin: Origin, folder: Path, scratch: Path) -> None:
    """Atomic; `scratch` is a folder on the same file system."""
    record = scratch / _RECORD
    record.write_text(json.dumps(asdict(origin), default=str))
    record.replace(folder / _RECORD)


def read_origin(folder: Path) -> Origin | None:
    """None if there is no readable record: the folder was not converted here."""
    try:
        fields = json.loads((folder / _RECORD).read_text())
        tensors = {name: Stored(**stored) for name, stored in fields["tensors"].items()}
        return Origin(Path(fields["path"]), fields["sha256"], fields["num_bytes"], tensors)
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
