"""Makes a workload of a trace's rows: validates them, and spreads requests of the same tick.

Reads no further than the options need, so the first requests of a huge file load fast.
"""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster.offline.workload import changes
from cluster.offline.workload.arrivals import MAX_REQUESTS, MAX_TOKENS, Arrival, Workload, WorkloadError
from cluster.offline.workload.options import WorkloadOptions
from cluster.offline.workload.streams import opened
from cluster.offline.workload.traces import TraceRow, read

_LARGEST_ID = 2**64 - 1  # of a prefix block
_LONGEST_TICK_S = 60.0
_TICKS = 100  # enough to know the usual one


def collect(path: Path, options: WorkloadOptions, seed: int) -> Workload:
    """What the file has, from time 0 on, with jitter; all at once if it has no times."""
    with opened(path) as stream:
        trace = read(stream, path)
        filled = _Filled(trace.rows, trace.drops_empty)
        arrivals = list(_wanted(_arrivals(filled, trace.block_tokens), options, path, trace.ticked))
    left_out = f"{filled.empty} requests of 0 tokens left out" if filled.empty else ""
    if not arrivals:
        window = "" if options.begin is None else f" from {options.begin:g} s on"
        raise WorkloadError(f"{path} has no requests{window}{left_out and ', '}{left_out}")
    name = os.path.splitext(path.name.removesuffix(".gz"))[0]
    workload = Workload(name, tuple(arrivals), trace.block_tokens, tuple(filter(None, (trace.note, left_out))))
    return _spread(workload, options, seed, trace.ticked)


class _Filled:
    """Rows without those of 0 tokens, if these may be dropped; counts them."""

    def __init__(self, rows: Iterable[TraceRow], drops: bool) -> None:
        self._rows, self._drops, self.empty = rows, drops, 0

    def __iter__(self) -> Iterator[TraceRow]:
        for row in self._rows:
            if self._drops and 0 in (row.prompt_tokens, row.output_tokens):
                self.empty += 1
            else:
                yield row


def _arrivals(rows: Iterable[TraceRow], block_tokens: int) -> Iterator[Arrival]:
    """Validated rows, with times counted from the first one."""
    begin_s: float | None = None
    last_s, timed = -math.inf, True
    for row in rows:
        at_s = 0.0 if row.at_s is None else row.at_s
        if begin_s is None:
            begin_s, timed = at_s, row.at_s is not None
        if problem := _problem(row, block_tokens, last_s, timed):
            raise WorkloadError(f"{row.place}: {problem}")
        last_s = at_s
        yield Arrival(at_s - begin_s, row.prompt_tokens, row.output_tokens, row.prefix, row.session)


def _problem(row: TraceRow, block_tokens: int, last_s: float, timed: bool) -> str:
    """Why this row is invalid; empty if it is valid."""
    if timed is not (row.at_s is not None):
        return "some requests have a time and some have none"
    if row.at_s is not None and not math.isfinite(row.at_s):
        return f"the time is {row.at_s}, which is not a number of seconds"
    if row.at_s is not None and row.at_s < last_s:
        return f"time goes back by {last_s - row.at_s:.6g} s; sort the file by time"
    for what, tokens in (("prompt", row.prompt_tokens), ("answer", row.output_tokens)):
        if not 1 <= tokens <= MAX_TOKENS:
            return f"the {what} has {str(tokens)[:20]} tokens; it must have 1 to {MAX_TOKENS:,}"
    if (len(row.prefix) - 1) * block_tokens >= row.prompt_tokens:
        return f"{len(row.prefix)} blocks of {block_tokens} tokens are more than the prompt of {row.prompt_tokens} has"
    if row.prefix and not (min(row.prefix) >= 0 and max(row.prefix) <= _LARGEST_ID):
        return f"a prefix block's id must be 0 to {_LARGEST_ID}"
    return ""


def _wanted(arrivals: Iterator[Arrival], options: WorkloadOptions, path: Path, ticked: bool) -> Iterator[Arrival]:
    """The arrivals that the options can need. Jitter needs a few ticks more, and some before a window."""
    begin_s = options.begin or 0.0
    reach_s = options.jitter if isinstance(options.jitter, float) else _LONGEST_TICK_S
    first = None if begin_s else options.first
    ticks_wanted = _TICKS if ticked or options.jitter not in (None, "auto", "off") else 0
    count, ticks, last_s = 0, 0, -1.0
    for arrival in arrivals:
        ticks += arrival.at_s != last_s
        last_s = arrival.at_s
        if first is not None and count >= first and ticks > ticks_wanted:
            return
        if options.until is not None and arrival.at_s >= options.until:
            return
        if arrival.at_s < begin_s - reach_s:
            continue
        if count == MAX_REQUESTS:
            raise WorkloadError(f"{path}: more than {MAX_REQUESTS:,} requests; take a part, by first= or from=, until=")
        yield arrival
        count += 1


def _spread(workload: Workload, options: WorkloadOptions, seed: int, ticked: bool) -> Workload:
    wish = options.jitter or "auto"
    if isinstance(wish, float):
        return changes.jittered(workload, wish, seed)
    if wish == "auto" and not ticked:
        return workload
    tick = changes.tick_s([each.at_s for each in workload.arrivals])
    if wish == "on" and not tick:
        raise WorkloadError(f"{workload.name}: no ticks in its times; say jitter=off, or the tick's seconds")
    if not tick:
        return workload
    if wish == "off":
        return workload.with_note(workload.arrivals, f"arrivals left on their ticks of {tick:.4g} s")
    return changes.jittered(workload, tick, seed)
