"""Histograms, and the totals of a gateway's requests. Pure; knows no metric names.

Adding a value is one binary search over about twenty bounds. Memory grows only with the label sets in use.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The bounds of vLLM's time to first token.
SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# The bounds of vLLM's time between tokens, and smaller ones.
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
BYTES = tuple(float(4**power) for power in range(6, 18))  # 4 KiB to 16 GiB
RANGES = tuple(float(4**power) for power in range(11))


@dataclass(frozen=True, slots=True)
class HistogramRow:
    """One histogram: `counts` up to each bound and above the last; not cumulative."""

    labels: tuple[str, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Histograms:
    """Histograms of one quantity, by labels."""

    bounds: tuple[float, ...]
    rows: tuple[HistogramRow, ...] = ()

    def summed(self, *first: str) -> "Histograms":
        """The sum of all rows whose labels begin with `first`, as one row without labels."""
        rows = [row for row in self.rows if row.labels[: len(first)] == first]
        counts = tuple(map(sum, zip(*(row.counts for row in rows), strict=True))) or (0,) * (len(self.bounds) + 1)
        return Histograms(self.bounds, (HistogramRow((), counts, sum(row.total for row in rows)),))

    def ending(self, last: str) -> "Histograms":
        """The rows whose last label is `last`."""
        return Histograms(self.bounds, tuple(row for row in self.rows if row.labels[-1] == last))


class HistogramBuilder:
    """Builds `Histograms`. The caller bounds the label sets; those of `begun` exist from the start."""

    def __init__(self, bounds: tuple[float, ...], begun: Iterable[tuple[str, ...]] = ()) -> None:
        self._bounds = bounds
        self._counts = {labels: [0] * (len(bounds) + 1) for labels in begun}
        self._totals = dict.fromkeys(self._counts, 0.0)

    def add(self, labels: tuple[str, ...], value: float) -> None:
        self.add_all(labels, (value,))

    def add_all(self, labels: tuple[str, ...], values: Sequence[float]) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._totals[labels] = 0.0
        if not values:
            return
        self._totals[labels] += sum(values)
        low, high, counted = bisect_left(self._bounds, min(values)), bisect_left(self._bounds, max(values)), 0
        for place in range(low, high):  # few: gaps between the tokens of an answer are much alike
            before, counted = counted, sum(map(self._bounds[place].__ge__, values))
            counts[place] += counted - before
        counts[high] += len(values) - counted

    def snapshot(self) -> Histograms:
        rows = (HistogramRow(labels, tuple(counts), self._totals[labels]) for labels, counts in self._counts.items())
        return Histograms(self._bounds, tuple(rows))


_SECONDS, _TOKEN_SECONDS, _TOKENS, _BYTES, _RANGES = map(Histograms, (SECONDS, TOKEN_SECONDS, TOKENS, BYTES, RANGES))


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """Totals of one gateway since it started, from `cluster.observe.request_metrics`. Comments name the labels."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finishes: tuple[tuple[str, int], ...] = ()
    ttft: Histograms = _SECONDS  # class
    tpot: Histograms = _TOKEN_SECONDS  # class; the mean of each answer
    gaps: Histograms = _TOKEN_SECONDS  # class; between any two tokens
    requests: Histograms = _SECONDS  # class, outcome
    prompts: Histograms = _TOKENS  # class
    answers: Histograms = _TOKENS  # class
    parts: Histograms = _SECONDS  # part of the ledger
    stages: Histograms = _SECONDS  # queue, prefill, decode, inference: as vLLM divides a request
    transfer_seconds: Histograms = _SECONDS  # transport
    transfer_bytes: Histograms = _BYTES  # transport
    transfer_ranges: Histograms = _RANGES  # transport
