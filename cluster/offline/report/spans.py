"""Spans of a run for charts: a request's phases, steps in lanes, and which request to show. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from cluster.observe.ledger import Span, is_visible, phase_spans, transfer_span
from cluster.offline.scoring.records import RequestOutcome, RequestRecord, Run, StepRecord

T = TypeVar("T")


def phases(served: RequestRecord) -> tuple[Span, ...]:
    """The ledger's phases in order from the arrival: those up to the first token, then those up to the last.

    A ledger has sums, so a phase that occurred several times is one span. Empty without a ledger (the request did not
    finish); phases below one microsecond are left out.
    """
    if served.ledger is None:
        return ()
    parts = phase_spans(served.ledger, round(served.arrival_s * 1e9))
    return tuple(filter(is_visible, parts))


def whole(served: RequestRecord) -> Span:
    """From the arrival to the end of the ledger, or else to the last token."""
    begin = round(served.arrival_s * 1e9)
    if served.ledger is not None:
        return Span("request", begin, begin + served.ledger.total_ns)
    return Span("request", begin, max(begin, round(served.token_s[-1] * 1e9)) if len(served.token_s) else begin)


def transfer(served: RequestRecord) -> Span | None:
    """The KV handoff, which ends when the wait for it ended; most of it overlaps with the prefill."""
    if served.ledger is None:
        return None
    return transfer_span(served.ledger, round(served.arrival_s * 1e9), round(served.transfer_s * 1e9))


_SAME_S = 1e-9  # rounding of float sums: a step may seem to begin just before its predecessor ends


def lanes(steps: Iterable[StepRecord]) -> tuple[tuple[int, StepRecord], ...]:
    """Each step of a worker with its lane: steps in flight at the same time (pipeline stages) get different lanes."""
    return in_lanes(steps, lambda step: (step.begin_s, step.end_s), _SAME_S)


def in_lanes(
    items: Iterable[T], extent: Callable[[T], tuple[float, float]], slack: float = 0
) -> tuple[tuple[int, T], ...]:
    """The items by begin, each with the first lane that is free at that time."""
    free: list[float] = []  # end of the last item in each lane
    found = []
    for one in sorted(items, key=extent):
        begin, end = extent(one)
        lane = next((lane for lane, until in enumerate(free) if until <= begin + slack), len(free))
        free[lane : lane + 1] = [end]
        found.append((lane, one))
    return tuple(found)


def typical(run: Run, percentile: float = 50.0) -> RequestRecord | None:
    """The finished request with a ledger at this percentile of E2E; None if there is none."""
    finished = [each for each in run.served if each.outcome is RequestOutcome.FINISHED and each.ledger is not None]
    ordered: Sequence[RequestRecord] = sorted(finished, key=lambda each: (each.e2e_s or 0.0, each.index))
    return ordered[min(len(ordered) - 1, int(len(ordered) * percentile / 100.0))] if ordered else None
