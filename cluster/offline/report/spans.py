"""What happened when, by a run's records: a request's phases as spans, steps in lanes, what is worth showing. Pure."""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from cluster.observe.ledger import Span, is_noticed, phase_spans, transfer_span
from cluster.offline.scoring.records import RequestOutcome, Run, Served, StepRecord

T = TypeVar("T")

WINDOW_STEPS = 100  # of the busiest worker, in the part that is shown


def phases(served: Served) -> tuple[Span, ...]:
    """The ledger's phases one behind the other from the arrival on, up to the first token and up to the last.

    A ledger has sums: what a request did several times, over several attempts, is one span. Without a ledger (the
    request did not finish) there are none; phases of less than a microsecond are left out.
    """
    if served.ledger is None:
        return ()
    parts = phase_spans(served.ledger, round(served.arrival_s * 1e9))
    return tuple(filter(is_noticed, parts))


def whole(served: Served) -> Span:
    """From arrival to the end of the books, or to the last token that came."""
    begin = round(served.arrival_s * 1e9)
    if served.ledger is not None:
        return Span("request", begin, begin + served.ledger.total_ns)
    return Span("request", begin, max(begin, round(served.token_s[-1] * 1e9)) if len(served.token_s) else begin)


def transfer(served: Served) -> Span | None:
    """The hand-off's elapsed time, ending where the wait for it ended; most of it lies behind the prefill."""
    if served.ledger is None:
        return None
    return transfer_span(served.ledger, round(served.arrival_s * 1e9), round(served.transfer_s * 1e9))


_SAME_S = 1e-9  # times are sums of floats: a step may seem to begin just before the one that it follows ended


def lanes(steps: Iterable[StepRecord]) -> tuple[tuple[int, StepRecord], ...]:
    """Each step of one worker with its lane: steps in flight at the same time (pipeline stages) have different ones."""
    return laid(steps, lambda step: (step.begin_s, step.end_s), _SAME_S)


def laid(each: Iterable[T], extent: Callable[[T], tuple[float, float]], slack: float = 0) -> tuple[tuple[int, T], ...]:
    """All in the order of their beginnings, each with the first lane that is free then."""
    free: list[float] = []  # when each lane's last one ends
    found = []
    for one in sorted(each, key=extent):
        begin, end = extent(one)
        lane = next((lane for lane, until in enumerate(free) if until <= begin + slack), len(free))
        free[lane : lane + 1] = [end]
        found.append((lane, one))
    return tuple(found)


def middle(run: Run) -> tuple[float, float]:
    """Seconds from and to, so that the worker with the most steps has `WINDOW_STEPS` there, around the middle prompt.

    Not around the middle step: at the end of a run come long answers and no prompts. The run must have been traced.
    """
    most = Counter(step.worker for step in run.steps).most_common(1)[0][0]
    steps = sorted((step for step in run.steps if step.worker == most), key=lambda step: step.begin_s)
    prompts = sorted(step.begin_s for step in run.steps if step.prompt_tokens) or [step.begin_s for step in steps]
    at = bisect([step.begin_s for step in steps], prompts[len(prompts) // 2])
    first = max(0, min(at - WINDOW_STEPS // 2, len(steps) - WINDOW_STEPS))
    return steps[first].begin_s, max(step.end_s for step in steps[first : first + WINDOW_STEPS])


def typical(run: Run, percentile: float = 50.0) -> Served | None:
    """The finished request with a ledger that stands at this percentile of E2E; None when there is none."""
    finished = [each for each in run.served if each.ending is RequestOutcome.FINISHED and each.ledger is not None]
    ordered: Sequence[Served] = sorted(finished, key=lambda each: (each.e2e_s or 0.0, each.index))
    return ordered[min(len(ordered) - 1, int(len(ordered) * percentile / 100.0))] if ordered else None
