"""Any run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open. Real and virtual runs alike.

    process of each worker     a thread for each lane: steps in flight at once must not overlap on one thread
    process "requests"         an async track for each request, with the phases of its ledger
    arrows                     from the last prefill step of a request to its first decode step elsewhere

Written in the Trace Event Format (JSON), as Perfetto reads it: `ts` and `dur` in microseconds; threads are numbered
over all processes, because Perfetto names them by number alone; async events that share category and id nest. Times
are whole microseconds, so that what touches in the run touches here and nothing overlaps by a rounding.
Arrows need steps, so a run must have been traced to have them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.report.spans import lanes, phases, transfer, whole
from cluster.scoring.records import Run, Served, StepRecord

Event = dict[str, Any]
REQUESTS = 1  # the process of the requests; workers follow


def events(run: Run) -> Iterator[Event]:
    """Names first, then steps by worker, arrows, and requests."""
    yield _name("process_name", REQUESTS, 0, f"requests of {run.system}")
    yield {"ph": "M", "name": "process_sort_index", "pid": REQUESTS, "tid": 0, "args": {"sort_index": -1}}
    places: dict[int, tuple[int, int]] = {}  # step, by identity -> process and thread
    thread = REQUESTS
    workers = dict.fromkeys([*(worker.name for worker in run.workers), *(step.worker for step in run.steps)])
    by_worker: dict[str, list[StepRecord]] = {name: [] for name in workers}
    for step in run.steps:
        by_worker[step.worker].append(step)
    for process, (worker, steps) in enumerate(by_worker.items(), REQUESTS + 1):
        yield _name("process_name", process, 0, worker)
        laid = lanes(steps)
        for lane in range(1 + max((lane for lane, _ in laid), default=0)):
            yield _name("thread_name", process, thread + 1 + lane, f"engine, lane {lane}" if lane else "engine")
        for lane, step in laid:
            places[id(step)] = process, thread + 1 + lane
            yield _step(step, *places[id(step)])
        thread += 1 + max((lane for lane, _ in laid), default=0)
    yield from _arrows(run, places)
    for served in run.served:
        yield from _request(served)


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _step(step: StepRecord, process: int, thread: int) -> Event:
    counts = ((step.prompt_tokens, "prompt tokens"), (step.batch, "decodes"))
    begin_us, end_us = round(step.begin_s * 1e6), round(step.end_s * 1e6)
    return {
        **{"ph": "X", "cat": "step", "pid": process, "tid": thread, "ts": begin_us, "dur": end_us - begin_us},
        "name": " + ".join(f"{count} {what}" for count, what in counts if count) or "step",
        "args": {"prompt_tokens": step.prompt_tokens, "decodes": step.batch, "requests": list(step.requests)},
    }


def _arrows(run: Run, places: dict[int, tuple[int, int]]) -> Iterator[Event]:
    """A flow starts within the slice it leaves, and ends at the beginning of the slice it enters."""
    prefills: dict[int, StepRecord] = {}
    decodes: dict[int, StepRecord] = {}
    handed = {each.index: each for each in run.served if each.prefill_worker != each.decode_worker}
    for step in sorted(run.steps, key=lambda step: step.begin_s):
        for index in step.requests:
            if (served := handed.get(index)) is None:
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


def _request(served: Served) -> Iterator[Event]:
    """The whole request, its phases within it, and the hand-off on a track of its own, for it overlaps with them."""
    args = {
        "ending": served.ending.value,
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
    track = {"cat": "request", "id": f"0x{served.index + 1:x}", "pid": REQUESTS, "tid": 0}
    span = whole(served)
    title = f"request {served.index}"
    yield {"ph": "b", **track, "name": title, "ts": _us(span.begin_ns), "args": args}
    for phase in phases(served):
        yield {"ph": "b", **track, "name": phase.name, "ts": _us(phase.begin_ns)}
        yield {"ph": "e", **track, "name": phase.name, "ts": _us(phase.end_ns)}
    yield {"ph": "e", **track, "name": title, "ts": _us(span.end_ns)}
    if (moved := transfer(served)) is not None:
        apart = {**track, "cat": "transfer", "name": f"transfer {served.index}"}
        yield {"ph": "b", **apart, "ts": _us(moved.begin_ns), "args": {"bytes": served.transfer_bytes}}
        yield {"ph": "e", **apart, "ts": _us(moved.end_ns)}


def _us(ns: int) -> int:
    return round(ns / 1e3)


def write(run: Run, path: Path) -> int:
    """As one file, an event a line; returns how many. Holds few events at a time. The folder is made."""
    import msgspec

    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    about = {"system": run.system, "workload": run.workload, "clock": run.clock, "seed": run.seed, "gpus": run.gpus}
    encode = msgspec.json.encode
    with path.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n')
        for event in events(run):
            out.write((b",\n" if count else b"") + encode(event))
            count += 1
        out.write(b"\n]}\n")
    return count
