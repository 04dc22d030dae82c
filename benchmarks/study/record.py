"""What was measured, as a small file beside this one: all that the figures in virtual time follow from."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.study.real import Naive, Real
from workers.costs import LinearCost
from workers.profiles.fit import Point

FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """`cost` is fitted to `points`; it stands here too, since another machine may round the fit otherwise."""

    date: str
    machine: str
    versions: str
    threads: int
    cost: LinearCost
    points: tuple[Point, ...]
    naive: tuple[Naive, ...] = ()
    real: tuple[Real, ...] = ()


def load(file: Path = FILE) -> Measured:
    """Raises OSError and `msgspec.ValidationError`."""
    import msgspec

    return msgspec.json.decode(file.read_bytes(), type=Measured)


def save(measured: Measured, file: Path = FILE) -> None:
    import msgspec

    file.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
