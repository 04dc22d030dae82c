"""A time window of a real cluster, from its gateways' history, as a Chrome trace (format: `perfetto.py`).

    process "requests"         an async track for each request, with all its parts
    process of each gateway    admission, route, reserve, recovery; refusals
    process of each worker     the parts of requests that ran there, each request on one thread; incoming KV; counters
                               of queue and KV; flips, migrations, losses

A ledger has sums, so a phase that occurred several times is one part. The parts of a request add up to its end-to-end
time. Requests are not cut at the ends of the window.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from cluster.observe.ledger import Span, located_parts, parts, transfer_span
from cluster.offline.report.perfetto import REQUESTS, Event, named, track, us
from cluster.offline.report.spans import in_lanes
from diptych.history import Load, RequestTrace, Window


@dataclass(frozen=True, slots=True)
class _ProcessSpan:
    """Consecutive parts of one request in one process."""

    parts: tuple[Span, ...]
    args: Event

    @property
    def extent(self) -> tuple[int, int]:
        return self.parts[0].begin_ns, self.parts[-1].end_ns


def events(windows: Mapping[str, Window]) -> Iterator[Event]:
    """Names, then all events by time. `windows`: by gateway, in nanoseconds of one clock.

    All gateways record the loads of the same workers; the first gateway's are used.
    """
    places: dict[str, int] = {}
    process_spans: dict[tuple[str, str], list[_ProcessSpan]] = defaultdict(list)
    rest: list[Event] = []
    number = count()
    threads = count(REQUESTS + 1)
    gateways = [*windows]
    for gateway, window in windows.items():
        places.setdefault(gateway, REQUESTS + 1 + len(places))
        for trace in window.traces:
            rest += _request(next(number), trace)
            for place, process_span in _process_spans(trace, gateway):
                process_spans[place, "requests"].append(process_span)
            if (moved := _transfer(trace)) is not None:
                process_spans[moved[0], "KV in"].append(moved[1])
    for place, _ in process_spans:
        places.setdefault(place, REQUESTS + 1 + len(places))
    for window in windows.values():
        for worker in (*(each.worker for each in window.events), *(each.worker for each in window.loads)):
            if worker:
                places.setdefault(worker, REQUESTS + 1 + len(places))
    yield named("process_name", REQUESTS, 0, f"requests of {', '.join(gateways)}")
    for place, process in places.items():
        yield named("process_name", process, 0, place)
    for (place, kind), found in process_spans.items():
        lanes: dict[int, int] = {}
        for lane, process_span in in_lanes(found, lambda process_span: process_span.extent):
            if lane not in lanes:
                lanes[lane] = next(threads)
                yield named("thread_name", places[place], lanes[lane], f"{kind}, {lane}" if lane else kind)
            rest += _slices(process_span, places[place], lanes[lane])
    for gateway, window in windows.items():
        for each in window.events:
            rest.append(_instant(each.at_ns, each.kind, places[each.worker or gateway], each.text, each.request_id))
    for load in next((window.loads for window in windows.values() if window.loads), ()):
        rest += _counters(load, places[load.worker])
    yield from sorted(rest, key=lambda event: event["ts"])


def _request(number: int, trace: RequestTrace) -> Iterator[Event]:
    ledger = trace.ledger
    args = {
        "outcome": trace.outcome or "under way",
        "detail": trace.detail,
        "class": trace.class_name,
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        **{f"cached_{source}_tokens": count for source, count in trace.cached_from},
        "output_tokens": trace.output_tokens,
        "attempts": trace.attempts,
        "prefill_worker": trace.prefill_worker,
        "decode_workers": [trace.decode_worker, *(worker for _, worker in trace.moves)],
        "transfer_bytes": trace.transfer_bytes,
        "ttft_ms": ledger.ttft_ns / 1e6 if trace.output_tokens else None,
        "total_ms": (trace.end_ns - trace.arrived_ns) / 1e6,
    }
    shown = filter(_is_visible, parts(trace))
    return track(number, trace.request_id, Span("request", trace.arrived_ns, trace.end_ns), shown, args)


def _is_visible(span: Span) -> bool:
    return us(span.end_ns) > us(span.begin_ns)


def _process_spans(trace: RequestTrace, gateway: str) -> Iterator[tuple[str, _ProcessSpan]]:
    """The processes that the request went through, in order; a migration begins a new process_span."""
    args = {"request": trace.request_id, "outcome": trace.outcome or "under way"}
    for place, group in groupby(located_parts(trace, gateway), key=lambda each: each[0]):
        process_span = _ProcessSpan(tuple(span for _, span in group), args)
        if any(_is_visible(span) for span in process_span.parts):
            yield place, process_span


def _transfer(trace: RequestTrace) -> tuple[str, _ProcessSpan] | None:
    """The KV handoff; a request that migrated has none, because the ledger does not separate its transfers."""
    span = None if trace.moves else transfer_span(trace.ledger, trace.arrived_ns, trace.transfer_ns)
    if span is None or not trace.decode_worker:
        return None
    return trace.decode_worker, _ProcessSpan((span,), {"request": trace.request_id, "bytes": trace.transfer_bytes})


def _slices(process_span: _ProcessSpan, process: int, thread: int) -> Iterator[Event]:
    for span in filter(_is_visible, process_span.parts):
        on = {"pid": process, "tid": thread, "ts": us(span.begin_ns), "dur": us(span.end_ns) - us(span.begin_ns)}
        yield {"ph": "X", "cat": "part", "name": span.name, **on, "args": process_span.args}


def _instant(at_ns: int, kind: str, process: int, text: str, request_id: str) -> Event:
    args: dict[str, Any] = {"what": text} | ({"request": request_id} if request_id else {})
    on = {"cat": "happening", "pid": process, "tid": 0, "ts": us(at_ns)}
    return {"ph": "i", "name": kind, **on, "s": "p", "args": args}


def _counters(load: Load, process: int) -> Iterable[Event]:
    on = {"ph": "C", "pid": process, "tid": 0, "ts": us(load.at_ns)}
    yield {**on, "name": "sequences", "args": {"running": load.running, "waiting": load.waiting}}
    yield {**on, "name": "queued tokens", "args": {"tokens": load.queued_tokens}}
    yield {**on, "name": "KV blocks", "args": {"used": load.used_blocks}}
