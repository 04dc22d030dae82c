"""A request's trace as spans with their workers. Pure."""

from collections.abc import Iterator

from cluster.observe.history import RequestTrace
from cluster.observe.ledger import Span, phase_spans

AT_PREFILL = ("prefill_queue", "prefill_compute", "prefill_wire", "prefill")
AT_DECODE = ("transfer_wait", "decode_queue", "decode_compute", "decode_wire", "transfer", "decode")
UNFINISHED = ", no further part known"


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
