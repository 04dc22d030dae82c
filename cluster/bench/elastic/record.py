"""What a campaign found, as JSON: all that page and pictures are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from cluster.bench.elastic.one import Told
from cluster.bench.elastic.timeline import Timeline
from cluster.scoring.goodput import T95, Goodput
from workers.request import SLO

FILE = Path(__file__).with_name("measured.json")
OURS, SYSTEM, SPLIT, COLOCATED, ORACLE = "ours", "system", "best split", "best colocated", "oracle"
STATIC = (SPLIT, COLOCATED)


@dataclass(frozen=True, slots=True)
class Entry:
    """Goodput of one contender, in requests a second of all GPUs: the mean over seeds and its 95 % interval."""

    kind: str
    name: str
    by_seed: tuple[float, ...]
    rate: float
    low: float
    high: float
    prefills: int = 0

    @classmethod
    def of(cls, kind: str, name: str, found: Goodput, prefills: int = 0) -> "Entry":
        by_seed = tuple(round(each, 4) for each in found.by_seed)
        return cls(kind, name, by_seed, round(found.rate, 4), round(found.low, 4), round(found.high, 4), prefills)


@dataclass(frozen=True, slots=True)
class Phases:
    """What became of a contender's requests, by phase, at one rate."""

    name: str
    rate: float
    told: tuple[Told, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One workload. `wall_s` is what finding this took."""

    scenario: str
    title: str
    hardware: str
    gpus: int
    workers: int
    slo: SLO
    shifts: bool
    seconds: float
    boundaries: tuple[tuple[str, float], ...]  # of phases, each with its beginning
    full_rate: float  # requests a second at scale 1
    seeds: tuple[int, ...]
    tolerance: float
    entries: tuple[Entry, ...]
    phases: tuple[Phases, ...]
    timelines: tuple[Timeline, ...]
    wall_s: float
    effort: str = ""
    failed: tuple[str, ...] = ()

    def of(self, kind: str) -> Entry | None:
        return next((each for each in self.entries if each.kind == kind), None)

    @property
    def best_static(self) -> Entry:
        return max((each for each in self.entries if each.kind in STATIC), key=lambda each: each.rate)


@dataclass(frozen=True, slots=True)
class Stale:
    """Attainment of a router when statistics come so late, at one rate, by seed."""

    scenario: str
    routing: str
    stale_s: float
    gateways: int
    rate: float
    kept: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Record:
    date: str
    machine: str
    versions: str
    results: tuple[Result, ...] = ()
    stale: tuple[Stale, ...] = ()
    absent: tuple[str, ...] = ()

    def with_result(self, result: Result) -> "Record":
        """In the place of an older one of the same workload."""
        others = tuple(each for each in self.results if each.scenario != result.scenario)
        return replace(self, results=(*others, result))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two goodputs, seed by seed where both have the same seeds; `low` to `high` is the 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def told(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})" if self.high > self.low else f"{self.mean:.2f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """None when theirs is 0 for some seed."""
    pairs = list(zip(ours, theirs, strict=False))  # who ran with fewer seeds is compared on those
    if not pairs or any(other <= 0.0 for _, other in pairs):
        return None
    each = [one / other for one, other in pairs]
    off = T95[min(len(each) - 1, len(T95)) - 1] * stdev(each) / sqrt(len(each)) if len(each) > 1 else 0.0
    return Ratio(fmean(each), fmean(each) - off, fmean(each) + off)


def load(file: Path = FILE) -> Record:
    """Raises OSError and `msgspec.ValidationError`."""
    import msgspec

    return msgspec.json.decode(file.read_bytes(), type=Record)


def save(record: Record, file: Path = FILE) -> None:
    import msgspec

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
