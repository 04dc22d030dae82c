"""The latency ledger: durations of phases that sum exactly to TTFT and to the total; as spans, with their workers.

The dispatcher laps a `Stopwatch` on one clock, so the request is in exactly one phase at any time. A worker's own
measurements only divide a lap; the rest of the lap is time on the wire. Durations are integer nanoseconds, so sums are
exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diptych.clock import now_s
from diptych.events import PHASES as PHASES
from diptych.events import LatencyLedger as LatencyLedger
from diptych.history import RequestTrace

TRANSFER = "transfer"  # not a phase, because it overlaps with phases
MIN_SPAN_NS = 1_000
AT_PREFILL = ("prefill_queue", "prefill_compute", "prefill_wire", "prefill")
AT_DECODE = ("transfer_wait", "decode_queue", "decode_compute", "decode_wire", "transfer", "decode")
UNFINISHED = ", no further part known"


def now_ns() -> int:
    """For all ledgers of one process."""
    return round(now_s() * 1e9)


class Stopwatch:
    """Laps of one request. Owned by its dispatcher coroutine."""

    def __init__(self, now_ns: Callable[[], int], started_ns: int | None = None) -> None:
        self._now_ns = now_ns
        self.started_ns = self._mark = now_ns() if started_ns is None else started_ns
        self._parts: dict[str, int] = {}
        self._first: dict[str, int] | None = None
        self._first_ns = 0

    def lap(self, phase: str, parts: tuple[tuple[str, float], ...] = ()) -> None:
        """End the current lap. `parts`: (phase, seconds) within it, measured by other clocks; `phase` gets the rest.

        If the parts exceed the lap because clocks differ, the last parts are cut, so that no part is negative.
        """
        now = self._now_ns()
        left = now - self._mark
        self._mark = now
        for name, seconds in parts:
            ns = min(left, max(0, round(seconds * 1e9)))
            self._parts[name] = self._parts.get(name, 0) + ns
            left -= ns
        self._parts[phase] = self._parts.get(phase, 0) + left

    def first_token(self) -> None:
        """End the time to first token. Only the first call counts."""
        if self._first is None:
            self._first, self._parts = self._parts, {}
            self._first_ns = self._mark - self.started_ns

    def ledger(self) -> LatencyLedger:
        """The ledger up to the last lap."""
        first = self._first if self._first is not None else self._parts
        rest = self._parts if self._first is not None else {}
        total = self._mark - self.started_ns
        ttft = self._first_ns if self._first is not None else total
        ordered = [tuple((name, parts[name]) for name in PHASES if name in parts) for parts in (first, rest)]
        return LatencyLedger(ordered[0], ordered[1], ttft, total)


@dataclass(frozen=True, slots=True)
class Span:
    """A named time span. In integer nanoseconds, so that adjacent spans touch exactly."""

    name: str
    begin_ns: int
    end_ns: int


def phase_spans(ledger: LatencyLedger, begin_ns: int) -> tuple[Span, ...]:
    """The parts of a ledger that begins at `begin_ns`, in order."""
    spans, at = [], begin_ns
    for name, ns in ledger.first + ledger.rest:
        spans.append(Span(name, at, at + ns))
        at += ns
    return tuple(spans)


def transfer_span(ledger: LatencyLedger, begin_ns: int, transfer_ns: int) -> Span | None:
    """The KV transfer. It ends at the end of the wait for it; most of it overlaps with the prefill."""
    if transfer_ns <= 0:
        return None
    waits = [span for span in phase_spans(ledger, begin_ns) if span.name == "transfer_wait" and is_visible(span)]
    end_ns = waits[0].end_ns if waits else begin_ns + ledger.ttft_ns
    return Span(TRANSFER, max(begin_ns, end_ns - transfer_ns), end_ns)


def is_visible(span: Span) -> bool:
    """Whether it lasts a microsecond or more."""
    return span.end_ns - span.begin_ns >= MIN_SPAN_NS


def parts(trace: RequestTrace) -> tuple[Span, ...]:
    """Spans of the request's whole time; the time that is not in the ledger comes last."""
    found = phase_spans(trace.ledger, trace.arrived_ns)
    if not trace.open_ns:
        return found
    return (*found, Span(trace.phase + UNFINISHED, trace.end_ns - trace.open_ns, trace.end_ns))


def located_parts(trace: RequestTrace, gateway: str) -> Iterator[tuple[str, Span]]:
    """The parts, each with its worker or the gateway. A decode is split where it migrated."""
    return ((_place(piece, trace, gateway), piece) for span in parts(trace) for piece in _cut(span, trace))


def _cut(span: Span, trace: RequestTrace) -> Iterator[Span]:
    begin_ns = span.begin_ns
    if span.name.removesuffix(UNFINISHED) in AT_DECODE:
        for at_ns, _ in trace.moves:
            if begin_ns < at_ns < span.end_ns:
                yield Span(span.name, begin_ns, at_ns)
                begin_ns = at_ns
    yield Span(span.name, begin_ns, span.end_ns)


def _place(span: Span, trace: RequestTrace, gateway: str) -> str:
    phase = span.name.removesuffix(UNFINISHED)
    if phase in AT_PREFILL:
        return trace.prefill_worker or gateway
    if phase in AT_DECODE:
        moved = [worker for at_ns, worker in trace.moves if at_ns <= span.begin_ns]
        return moved[-1] if moved else trace.decode_worker or gateway
    return gateway
