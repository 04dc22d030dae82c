"""The results of a campaign as JSON, the input of page and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.elastic.one import PhaseOutcome
from benchmarks.elastic.timeline import Timeline
from cluster.offline.scoring.goodput import T95
from workers.request import SLO

FILE = Path(__file__).with_name("measured.json")
OURS, SYSTEM, SPLIT, COLOCATED = "ours", "system", "best split", "best colocated"
PER_PHASE = "best static per phase"
ROUTER, TIMETABLE = "router", "timetable"
STATIC = (SPLIT, COLOCATED)
KINDS = (OURS, SPLIT, COLOCATED, SYSTEM, ROUTER, TIMETABLE, PER_PHASE)


@dataclass(frozen=True, slots=True)
class Entry:
    """Goodput of one contender, in requests per second of all GPUs: the mean over seeds and its 95 % interval.

    `date`: when it was measured; empty until `Result.stamped`.
    """

    kind: str
    name: str
    by_seed: tuple[float, ...]
    rate: float
    low: float
    high: float
    prefills: int = 0
    date: str = ""

    @classmethod
    def of(cls, kind: str, name: str, found: Sequence[float], prefills: int = 0) -> "Entry":
        """`found`: goodputs by seed."""
        mean, low, high = _interval(found)
        by_seed = tuple(round(each, 4) for each in found)
        return cls(kind, name, by_seed, round(mean, 4), round(max(0.0, low), 4), round(high, 4), prefills)


@dataclass(frozen=True, slots=True)
class Phases:
    """Outcomes of a contender's requests by phase, at one rate. `told`: one per phase."""

    name: str
    rate: float
    told: tuple[PhaseOutcome, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One workload. `wall_s`: the time of its measurement. `machine`, `versions`: of the latest one."""

    scenario: str
    title: str
    hardware: str
    gpus: int
    workers: int
    slo: SLO
    shifts: bool
    seconds: float
    boundaries: tuple[tuple[str, float], ...]  # (name, start) of each phase
    full_rate: float  # requests per second at scale 1
    seeds: tuple[int, ...]
    tolerance: float
    entries: tuple[Entry, ...]
    phases: tuple[Phases, ...]
    timelines: tuple[Timeline, ...]
    wall_s: float
    effort: str = ""
    failed: tuple[str, ...] = ()
    machine: str = ""
    versions: str = ""

    def stamped(self, date: str, machine: str, versions: str) -> "Result":
        """With this date for the entries that have none."""
        entries = tuple(each if each.date else replace(each, date=date) for each in self.entries)
        return replace(self, entries=entries, machine=machine, versions=versions)

    @property
    def dates(self) -> tuple[str, ...]:
        """The days on which its entries were measured."""
        return tuple(sorted({each.date for each in self.entries}))

    def of(self, *kinds: str) -> Entry | None:
        """The best of these kinds."""
        return max((each for each in self.entries if each.kind in kinds), key=lambda each: each.rate, default=None)

    @property
    def best_static(self) -> Entry | None:
        return self.of(*STATIC)

    @property
    def num_seeds(self) -> int:
        """The largest number of seeds of an entry."""
        return max((len(each.by_seed) for each in self.entries), default=0)


@dataclass(frozen=True, slots=True)
class Stale:
    """SLO attainment of a router with statistics that are `stale_s` old, at one rate. `kept`: by seed."""

    scenario: str
    routing: str
    stale_s: float
    gateways: int
    rate: float
    kept: tuple[float, ...]
    date: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    results: tuple[Result, ...] = ()
    stale: tuple[Stale, ...] = ()
    absent: tuple[str, ...] = ()

    def with_result(self, result: Result) -> "Record":
        """Add a result, replacing the older one of the same workload."""
        by_name = {each.scenario: each for each in self.results} | {result.scenario: result}
        absent = tuple(name for name in self.absent if name != result.scenario)
        return replace(self, results=tuple(by_name.values()), absent=absent)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two goodputs over their common seeds; `low` to `high` is the 95 % interval."""

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    @property
    def text(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})" if self.high > self.low else f"{self.mean:.2f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """None when theirs is 0 for some seed."""
    pairs = list(zip(ours, theirs, strict=False))  # only common seeds are compared
    if not pairs or any(other <= 0.0 for _, other in pairs):
        return None
    each = tuple(one / other for one, other in pairs)
    return Ratio(*_interval(each), each)


def _interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and Student's 95 % interval (of one sample: itself)."""
    mean, count = fmean(samples), len(samples)
    off = T95[min(count - 1, len(T95)) - 1] * stdev(samples) / sqrt(count) if count > 1 else 0.0
    return mean, mean - off, mean + off


def load(file: Path = FILE) -> Record:
    """Raises OSError and `msgspec.ValidationError`."""
    import msgspec

    return msgspec.json.decode(file.read_bytes(), type=Record)


def save(record: Record, file: Path = FILE) -> None:
    import msgspec

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
