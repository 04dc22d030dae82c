"""Results of a measurement: spreads over rounds, figures in tables, and claims with a pass or fail verdict. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cluster.offline.report.table import Grid

Progress = Callable[[str], None]  # receives one line at a time


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, minimum and maximum of `rounds` samples."""

    median: float
    low: float
    high: float
    rounds: int

    def __post_init__(self) -> None:
        if not self.low <= self.median <= self.high or self.rounds < 1:
            raise ValueError(f"{self.low} <= {self.median} <= {self.high} over {self.rounds} rounds is no spread")


def spread(samples: Iterable[float]) -> Spread:
    """Raises ValueError without samples."""
    taken = sorted(samples)
    if not taken:
        raise ValueError("no sample was taken")
    return Spread(median(taken), taken[0], taken[-1], len(taken))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, round by round."""
    return spread(one / other for one, other in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Figure:
    """One cell: `row` and `column` of `table`. `unit` is one of `UNITS`."""

    table: str
    row: str
    column: str
    unit: str
    spread: Spread

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit {self.unit!r} is not one of {', '.join(UNITS)}")


# unit -> (factor, digits, suffix)
UNITS = {
    "s": (1.0, 2, " s"),
    "ms": (1e3, 1, " ms"),
    "us": (1e6, 0, " us"),
    "MiB": (1 / 2**20, 0, " MiB"),
    "GB/s": (1e-9, 2, " GB/s"),
    "GFLOP/s": (1e-9, 0, " GFLOP/s"),
    "1/s": (1.0, 0, " /s"),
    "req/s": (1.0, 2, ""),
    "tok/s": (1.0, 1, ""),
    "n": (1.0, 0, ""),
    "nat": (1.0, 4, ""),
    "x": (1.0, 2, "x"),
    "%": (100.0, 1, "%"),
}


def readable(value: float, unit: str) -> str:
    """A value in SI units (seconds, bytes, bytes per second, shares), formatted."""
    factor, digits, suffix = UNITS[unit]
    return f"{value * factor:.{digits}f}{suffix}"


@dataclass(frozen=True, slots=True)
class BenchmarkClaim:
    """`value` should be at most `bound`, or at least `bound`; both in `unit`. `what` describes the comparison."""

    what: str
    value: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def verdict(self) -> str:
        return "pass" if self.met else "falls short"

    @property
    def text(self) -> str:
        direction = "at least" if self.at_least else "at most"
        return f"{self.what}: {readable(self.value, self.unit)}, aim {direction} {readable(self.bound, self.unit)}"

    def __str__(self) -> str:
        return f"{self.verdict}: {self.text}"


@dataclass(frozen=True, slots=True)
class BenchmarkPart:
    """One part's result. `skipped` or `failed` is the reason for missing figures."""

    name: str
    figures: tuple[Figure, ...] = ()
    claims: tuple[BenchmarkClaim, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    skipped: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """One run: date, machine, versions and results."""

    date: str
    machine: str
    cores: int
    cpus: str
    memory_bytes: int
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]
    versions: dict[str, str]
    rounds: int  # 0: each part's own number
    quick: bool
    parts: tuple[BenchmarkPart, ...]

    @property
    def unmet(self) -> tuple[BenchmarkClaim, ...]:
        """Claims that were not met."""
        return tuple(claim for part in self.parts for claim in part.claims if not claim.met)


def grids(figures: Sequence[Figure]) -> tuple[Grid, ...]:
    """The figures as tables. Tables, rows and columns keep the order of their first figure."""
    return tuple(_grid(title, [each for each in figures if each.table == title]) for title in _tables(figures))


def _tables(figures: Sequence[Figure]) -> list[str]:
    return list(dict.fromkeys(figure.table for figure in figures))


def _grid(title: str, figures: Sequence[Figure]) -> Grid:
    columns = list(dict.fromkeys(figure.column for figure in figures))
    cells = {(figure.row, figure.column): cell(figure) for figure in figures}
    rows = list(dict.fromkeys(figure.row for figure in figures))
    written = tuple((row, *(cells.get((row, column), "") for column in columns)) for row in rows)
    return Grid(title, ("", *columns), written)


def cell(figure: Figure) -> str:
    """The median; with more than one round, also the range."""
    taken = figure.spread
    text = readable(taken.median, figure.unit)
    if taken.rounds == 1:
        return text
    factor, digits, _ = UNITS[figure.unit]
    return f"{text} ({taken.low * factor:.{digits}f}..{taken.high * factor:.{digits}f})"


def report_json(report: BenchmarkReport) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(report))


def report_from(document: bytes | str) -> BenchmarkReport:
    """Parse the output of `report_json`. Raises `msgspec.ValidationError`."""
    import msgspec

    decoded: Any = msgspec.json.decode(document)
    return msgspec.convert(decoded, BenchmarkReport)
