"""The study's measurements, stored beside this file; the figures in virtual time follow from them."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.study.real import Naive, RealCell
from workers.costs import LinearCost
from workers.profiles.fit import Point

FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """`cost` is fitted to `points`; it is stored because another machine may round the fit differently."""

    date: str
    machine: str
    versions: str
    threads: int
    cost: LinearCost
    points: tuple[Point, ...]
    naive: tuple[Naive, ...] = ()
    real: tuple[RealCell, ...] = ()


def load(file: Path = FILE) -> Measured:
    """Raises OSError and `msgspec.ValidationError`."""
    import msgspec

    return msgspec.json.decode(file.read_bytes(), type=Measured)


def save(measured: Measured, file: Path = FILE) -> None:
    import msgspec

    file.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
