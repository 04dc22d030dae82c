"""A request's trail as spans: part by part, and where it was. Pure."""

from collections.abc import Iterator

from cluster.observe.history import RequestTrace
from cluster.observe.ledger import Span, booked

AT_PREFILL = ("prefill_queue", "prefill_compute", "prefill_wire", "prefill")
AT_DECODE = ("transfer_wait", "decode_queue", "decode_compute", "decode_wire", "transfer", "decode")
UNFINISHED = ", no further part known"


def parts(trail: RequestTrace) -> tuple[Span, ...]:
    """All of a request's time; what the ledger does not know yet, or never did, comes last."""
    found = booked(trail.ledger, trail.arrived_ns)
    if not trail.open_ns:
        return found
    return (*found, Span(trail.phase + UNFINISHED, trail.end_ns - trail.open_ns, trail.end_ns))


def stays(trail: RequestTrace, gateway: str) -> Iterator[tuple[str, Span]]:
    """The same, each with the worker or the gateway where it was spent. A decode that moved is cut where it did."""
    return ((_place(piece, trail, gateway), piece) for span in parts(trail) for piece in _cut(span, trail))


def _cut(span: Span, trail: RequestTrace) -> Iterator[Span]:
    begin_ns = span.begin_ns
    if span.name.removesuffix(UNFINISHED) in AT_DECODE:
        for at_ns, _ in trail.moves:
            if begin_ns < at_ns < span.end_ns:
                yield Span(span.name, begin_ns, at_ns)
                begin_ns = at_ns
    yield Span(span.name, begin_ns, span.end_ns)


def _place(span: Span, trail: RequestTrace, gateway: str) -> str:
    phase = span.name.removesuffix(UNFINISHED)
    if phase in AT_PREFILL:
        return trail.prefill_worker or gateway
    if phase in AT_DECODE:
        moved = [worker for at_ns, worker in trail.moves if at_ns <= span.begin_ns]
        return moved[-1] if moved else trail.decode_worker or gateway
    return gateway
