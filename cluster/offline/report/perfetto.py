"""Writes a real or simulated run as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

    process of each worker     a thread for each lane: steps in flight at the same time need separate threads
    process "requests"         an async track for each request, with its ledger phases
    arrows                     from a request's last prefill step to its first decode step on another worker

Uses the Trace Event Format (JSON) as Perfetto reads it: `ts` and `dur` in microseconds; thread numbers are unique over
all processes, because Perfetto names threads by number alone; async events with the same category and id nest. Times
are rounded to whole microseconds, so adjacent spans neither overlap nor leave a gap. Only traced runs have steps and
arrows.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.observe.ledger import Span
from cluster.offline.report.spans import lanes, phases, transfer, whole
from cluster.offline.scoring.records import RequestRecord, Run, StepRecord

Event = dict[str, Any]
REQUESTS = 1  # process id of the requests; workers follow


def events(run: Run) -> Iterator[Event]:
    """Names, then steps by worker, arrows, and requests."""
    yield named("process_name", REQUESTS, 0, f"requests of {run.system}")
    yield {"ph": "M", "name": "process_sort_index", "pid": REQUESTS, "tid": 0, "args": {"sort_index": -1}}
    places: dict[int, tuple[int, int]] = {}  # id(step) -> process, thread
    thread = REQUESTS
    workers = dict.fromkeys([*(worker.name for worker in run.workers), *(step.worker for step in run.steps)])
    by_worker: dict[str, list[StepRecord]] = {name: [] for name in workers}
    for step in run.steps:
        by_worker[step.worker].append(step)
    for process, (worker, steps) in enumerate(by_worker.items(), REQUESTS + 1):
        yield named("process_name", process, 0, worker)
        laid = lanes(steps)
        for lane in range(1 + max((lane for lane, _ in laid), default=0)):
            yield named("thread_name", process, thread + 1 + lane, f"engine, lane {lane}" if lane else "engine")
        for lane, step in laid:
            places[id(step)] = process, thread + 1 + lane
            yield _step(step, *places[id(step)])
        thread += 1 + max((lane for lane, _ in laid), default=0)
    yield from _arrows(run, places)
    for served in run.served:
        yield from _request(served)


def named(what: str, process: int, thread: int, title: str) -> Event:
    """The name of a process or thread."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": title}}


def _step(step: StepRecord, process: int, thread: int) -> Event:
    counts = ((step.prompt_tokens, "prompt tokens"), (step.batch, "decodes"))
    begin_us, end_us = round(step.begin_s * 1e6), round(step.end_s * 1e6)
    return {
        **{"ph": "X", "cat": "step", "pid": process, "tid": thread, "ts": begin_us, "dur": end_us - begin_us},
        "name": " + ".join(f"{count} {what}" for count, what in counts if count) or "step",
        "args": {"prompt_tokens": step.prompt_tokens, "decodes": step.batch, "requests": list(step.requests)},
    }


def _arrows(run: Run, places: dict[int, tuple[int, int]]) -> Iterator[Event]:
    """Each flow starts inside the prefill slice and ends at the beginning of the decode slice."""
    prefills: dict[int, StepRecord] = {}
    decodes: dict[int, StepRecord] = {}
    split = {each.index: each for each in run.served if each.prefill_worker != each.decode_worker}
    for step in sorted(run.steps, key=lambda step: step.begin_s):
        for index in step.requests:
            if (served := split.get(index)) is None:
                continue
            if step.worker == served.prefill_worker:
                prefills[index] = step
            elif step.worker == served.decode_worker:
                decodes.setdefault(index, step)
    for index, left in prefills.items():
        entered = decodes.get(index)
        if entered is not None and entered.begin_s >= left.end_s:
            flow = {"cat": "handoff", "name": "KV", "id": index + 1}
            for step, kind, at_s in ((left, "s", (left.begin_s + left.end_s) / 2), (entered, "f", entered.begin_s)):
                process, thread = places[id(step)]
                bound = {"bp": "e"} if kind == "f" else {}
                yield {"ph": kind, **flow, "pid": process, "tid": thread, "ts": round(at_s * 1e6), **bound}


def _request(served: RequestRecord) -> Iterator[Event]:
    """The request with its phases, and its KV handoff on a separate track, because it overlaps with them."""
    args = {
        "ending": served.outcome.value,
        "detail": served.detail,
        "prompt_tokens": served.prompt_tokens,
        "cached_tokens": served.cached_tokens,
        "output_tokens": len(served.token_s),
        "attempts": served.attempts,
        "prefill_worker": served.prefill_worker,
        "decode_worker": served.decode_worker,
        "ttft_ms": None if served.ttft_s is None else 1e3 * served.ttft_s,
        "tpot_ms": None if served.tpot_s is None else 1e3 * served.tpot_s,
    }
    yield from track(served.index, f"request {served.index}", whole(served), phases(served), args)
    if (moved := transfer(served)) is not None:
        apart = {**_track(served.index), "cat": "transfer", "name": f"transfer {served.index}"}
        yield {"ph": "b", **apart, "ts": us(moved.begin_ns), "args": {"bytes": served.transfer_bytes}}
        yield {"ph": "e", **apart, "ts": us(moved.end_ns)}


def track(number: int, title: str, span: Span, parts: Iterable[Span], args: Event) -> Iterator[Event]:
    """An async track: a span with nested parts."""
    on = _track(number)
    yield {"ph": "b", **on, "name": title, "ts": us(span.begin_ns), "args": args}
    for part in parts:
        yield {"ph": "b", **on, "name": part.name, "ts": us(part.begin_ns)}
        yield {"ph": "e", **on, "name": part.name, "ts": us(part.end_ns)}
    yield {"ph": "e", **on, "name": title, "ts": us(span.end_ns)}


def _track(number: int) -> Event:
    return {"cat": "request", "id": f"0x{number + 1:x}", "pid": REQUESTS, "tid": 0}


def us(ns: int) -> int:
    return (ns + 500) // 1000  # integers: a float cannot hold Unix time in nanoseconds


def write(run: Run, path: Path) -> int:
    """Write one file, an event per line, and return the number of events. Creates the folder."""
    about = {"system": run.system, "workload": run.workload, "clock": run.clock, "seed": run.seed, "gpus": run.gpus}
    return write_events(events(run), about, path)


def write_events(events: Iterable[Event], about: Event, path: Path) -> int:
    """Write any events with the given metadata, like `write`."""
    import msgspec

    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    encode = msgspec.json.encode
    with path.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n')
        for event in events:
            out.write((b",\n" if count else b"") + encode(event))
            count += 1
        out.write(b"\n]}\n")
    return count
