"""A window of a real run, as gateways remember it, as a Chrome trace: `cluster.offline.report.perfetto` has the format.

    process "requests"         an async track for each request, with all its parts
    process of each gateway    admission, route, reserve, recovery; refusals
    process of each worker     the parts of requests that were spent there, those of one request on one thread; its KV
                               coming in; counters of queue and KV; flips, moves, losses

A ledger has sums: what a request did several times is one part, laid behind the part before it. The parts of a request
sum to its end-to-end time. Nothing is cut at the window's ends: a request that reaches into it is there as a whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from cluster.observe.history import Load, RequestTrace, Window
from cluster.observe.ledger import Span, transfer_span
from cluster.observe.request_trace import located_parts, parts
from cluster.offline.report.perfetto import REQUESTS, Event, named, track, us
from cluster.offline.report.spans import laid


@dataclass(frozen=True, slots=True)
class _Stint:
    """Parts of one request, one behind the other in one place."""

    parts: tuple[Span, ...]
    args: Event

    @property
    def extent(self) -> tuple[int, int]:
        return self.parts[0].begin_ns, self.parts[-1].end_ns


def events(told: Mapping[str, Window]) -> Iterator[Event]:
    """Names first, then everything by time. `told` by each gateway, in nanoseconds of one clock.

    What gateways say of workers' loads they heard of the same workers: the first one's counts.
    """
    places: dict[str, int] = {}
    stints: dict[tuple[str, str], list[_Stint]] = defaultdict(list)
    rest: list[Event] = []
    number = count()
    threads = count(REQUESTS + 1)
    gateways = [*told]
    for gateway, window in told.items():
        places.setdefault(gateway, REQUESTS + 1 + len(places))
        for trail in window.trails:
            rest += _request(next(number), trail)
            for place, stint in _stints(trail, gateway):
                stints[place, "requests"].append(stint)
            if (moved := _transfer(trail)) is not None:
                stints[moved[0], "KV in"].append(moved[1])
    for place, _ in stints:
        places.setdefault(place, REQUESTS + 1 + len(places))
    for window in told.values():
        for worker in (*(each.worker for each in window.happenings), *(each.worker for each in window.loads)):
            if worker:
                places.setdefault(worker, REQUESTS + 1 + len(places))
    yield named("process_name", REQUESTS, 0, f"requests of {', '.join(gateways)}")
    for place, process in places.items():
        yield named("process_name", process, 0, place)
    for (place, kind), found in stints.items():
        lanes: dict[int, int] = {}
        for lane, stint in laid(found, lambda stint: stint.extent):
            if lane not in lanes:
                lanes[lane] = next(threads)
                yield named("thread_name", places[place], lanes[lane], f"{kind}, {lane}" if lane else kind)
            rest += _slices(stint, places[place], lanes[lane])
    for gateway, window in told.items():
        for each in window.happenings:
            rest.append(_instant(each.at_ns, each.kind, places[each.worker or gateway], each.text, each.request_id))
    for load in next((window.loads for window in told.values() if window.loads), ()):
        rest += _counters(load, places[load.worker])
    yield from sorted(rest, key=lambda event: event["ts"])


def _request(number: int, trail: RequestTrace) -> Iterator[Event]:
    ledger = trail.ledger
    args = {
        "outcome": trail.outcome or "under way",
        "detail": trail.detail,
        "class": trail.class_name,
        "prompt_tokens": trail.prompt_tokens,
        "cached_tokens": trail.cached_tokens,
        "output_tokens": trail.output_tokens,
        "attempts": trail.attempts,
        "prefill_worker": trail.prefill_worker,
        "decode_workers": [trail.decode_worker, *(worker for _, worker in trail.moves)],
        "transfer_bytes": trail.transfer_bytes,
        "ttft_ms": ledger.ttft_ns / 1e6 if trail.output_tokens else None,
        "total_ms": (trail.end_ns - trail.arrived_ns) / 1e6,
    }
    shown = filter(_shows, parts(trail))
    return track(number, trail.request_id, Span("request", trail.arrived_ns, trail.end_ns), shown, args)


def _shows(span: Span) -> bool:
    return us(span.end_ns) > us(span.begin_ns)


def _stints(trail: RequestTrace, gateway: str) -> Iterator[tuple[str, _Stint]]:
    """Where the request was, in order. A decode that moved is cut where it did."""
    args = {"request": trail.request_id, "outcome": trail.outcome or "under way"}
    for place, group in groupby(located_parts(trail, gateway), key=lambda each: each[0]):
        stint = _Stint(tuple(span for _, span in group), args)
        if any(_shows(span) for span in stint.parts):
            yield place, stint


def _transfer(trail: RequestTrace) -> tuple[str, _Stint] | None:
    """The first hand-off; what moves brought has no time of its own."""
    span = None if trail.moves else transfer_span(trail.ledger, trail.arrived_ns, trail.transfer_ns)
    if span is None or not trail.decode_worker:
        return None
    return trail.decode_worker, _Stint((span,), {"request": trail.request_id, "bytes": trail.transfer_bytes})


def _slices(stint: _Stint, process: int, thread: int) -> Iterator[Event]:
    for span in filter(_shows, stint.parts):
        on = {"pid": process, "tid": thread, "ts": us(span.begin_ns), "dur": us(span.end_ns) - us(span.begin_ns)}
        yield {"ph": "X", "cat": "part", "name": span.name, **on, "args": stint.args}


def _instant(at_ns: int, kind: str, process: int, text: str, request_id: str) -> Event:
    args: dict[str, Any] = {"what": text} | ({"request": request_id} if request_id else {})
    on = {"cat": "happening", "pid": process, "tid": 0, "ts": us(at_ns)}
    return {"ph": "i", "name": kind, **on, "s": "p", "args": args}


def _counters(load: Load, process: int) -> Iterable[Event]:
    on = {"ph": "C", "pid": process, "tid": 0, "ts": us(load.at_ns)}
    yield {**on, "name": "sequences", "args": {"running": load.running, "waiting": load.waiting}}
    yield {**on, "name": "queued tokens", "args": {"tokens": load.queued_tokens}}
    yield {**on, "name": "KV blocks", "args": {"used": load.used_blocks}}
