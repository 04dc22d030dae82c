"""Data sheets of GPUs, and of a CPU core: compute, memory, links, power and price.

The figures, each with its source, are in data/hardware.json; a file of the same form adds others.
"""

import json
import math
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from workers.profiles.profile_errors import ProfileError, UnknownName

DATA = Path(__file__).with_name("data")
# Bytes of a float -> the narrowest format that computes with them natively.
_FORMATS = {1: ("float8", "int8", "bfloat16"), 2: ("bfloat16", "float16"), 4: ("float32",)}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU. `flops`: dense FLOP/s by number format. Links are bytes/s of one GPU in one direction: to a GPU of its
    node, to one of another node, and to host memory. `watts` and `price_per_hour` include its share of the server where
    the source has it; None: no known price."""

    name: str
    flops: dict[str, float]
    memory_bytes: float
    memory_byte_s: float
    node_link_byte_s: float
    cross_link_byte_s: float
    host_link_byte_s: float
    gpus_per_node: int
    watts: float
    price_per_hour: float | None
    sources: dict[str, str]

    def __post_init__(self) -> None:
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.type in (int, float)}
        figures |= {f"flops.{name}": value for name, value in self.flops.items()}
        if self.price_per_hour is not None:
            figures["price_per_hour"] = self.price_per_hour
        for name, value in figures.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
                raise ProfileError(f"hardware {self.name!r}: {name} is {value!r}; it must be above 0, and finite")
        if not self.flops:
            raise ProfileError(f"hardware {self.name!r}: flops is empty; it needs one number format at least")
        if not isinstance(self.gpus_per_node, int):
            raise ProfileError(f"hardware {self.name!r}: gpus_per_node is {self.gpus_per_node!r}, no integer")

    def flops_of(self, element_bytes: int) -> float:
        """FLOP/s on numbers of this many bytes."""
        formats = _FORMATS.get(element_bytes, ())
        found = next((self.flops[each] for each in formats if each in self.flops), None)
        if found is None:
            raise ProfileError(f"hardware {self.name!r} has no FLOP/s for numbers of {element_bytes} bytes")
        return found


@cache
def known_hardware() -> dict[str, Hardware]:
    return read_hardware(DATA / "hardware.json")


def read_hardware(path: Path) -> dict[str, Hardware]:
    """All of a file: name to the fields of `Hardware`. Raises `ProfileError`."""
    try:
        sheets: dict[str, dict[str, Any]] = json.loads(path.read_text())
        return {name: Hardware(name=name, **sheet) for name, sheet in sheets.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path} is no hardware file: {error}; take data/hardware.json for a pattern") from None


def hardware_of(hardware: str | Hardware) -> Hardware:
    """By name, or the only one of a JSON file. Raises `ProfileError`."""
    if isinstance(hardware, Hardware):
        return hardware
    if (found := known_hardware().get(hardware.strip().lower())) is not None:
        return found
    if hardware.endswith(".json"):
        sheets = read_hardware(Path(hardware).expanduser())
        if len(sheets) != 1:
            raise ProfileError(f"{hardware} describes {len(sheets)} kinds of hardware; give a file of one")
        return next(iter(sheets.values()))
    raise UnknownName("hardware", hardware, known_hardware(), "; or give the path of a file like data/hardware.json")
