"""`load_workload`: parses a workload description and loads or generates the workload. Opens trace files.

Reads no further than the options need, so the first requests of a huge file load fast.
"""

import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cluster.offline.workload import changes
from cluster.offline.workload.arrivals import MAX_REQUESTS, MAX_TOKENS, Arrival, Workload, WorkloadError
from cluster.offline.workload.changes import WorkloadPhase
from cluster.offline.workload.lengths import MIXES, Lengths, Resampled, parse_lengths
from cluster.offline.workload.options import FOR_ALL_PROCESSES, FOR_TRACES, WorkloadOptions, parse_options, split
from cluster.offline.workload.processes import Process, burst, constant, day, gamma, on_off, poisson, weibull
from cluster.offline.workload.streams import opened
from cluster.offline.workload.traces import TraceRow, read

_OF_TIME = ("rate", "duration")  # not for bursts
_SEED_STRIDE = 1_000_003  # so that phases of one seed do not reuse another seed

# name -> process, and option -> parameter
_PROCESSES: dict[str, tuple[Callable[..., Process], dict[str, str]]] = {
    "poisson": (poisson, {}),
    "gamma": (gamma, {"cv": "cv"}),
    "weibull": (weibull, {"shape": "shape"}),
    "onoff": (on_off, {"on": "on_s", "off": "off_s"}),
    "day": (day, {"swing": "swing", "period": "period_s"}),
    "constant": (constant, {}),
    "burst": (burst, {}),
}
_LARGEST_ID = 2**64 - 1  # of a prefix block
_LONGEST_TICK_S = 60.0
_TICKS = 100  # enough to know the usual one


def load_workload(source: str, *, seed: int = 0) -> Workload:
    """Load a trace file or generate a synthetic workload from a one-line description.

    SOURCE[:KEY=VALUE,...]             one source with its options
    SOURCE[:...] + SOURCE[:...] + ...  phases, one after another

    SOURCE is a process of arrivals:
      poisson   exponential gaps
      gamma     gamma gaps; cv=2 is their coefficient of variation (1: as poisson; more: bursts)
      weibull   Weibull gaps; shape=0.5 (1: as poisson; less: bursts)
      onoff     poisson for on=60 seconds, silent for off=60
      day       poisson with a rate that swings by swing=0.5 (up to 1) over period=86400 seconds
      constant  equal gaps
      burst     all at once; has no rate
    with
      rate=4            mean requests a second
      count=500         how many; or
      duration=300      for how many seconds; or both: whichever comes first
      lengths=mixed     prompt/answer: short/short, short/long, long/short, long/long, mixed;
                        tokens, 1500/200; ranges, 1500-2000/500; several, 4x64/48+1024/48; or a trace to
                        draw them from

    or SOURCE is a trace file, plain or gzip, known by its content: Azure 2023 and 2024, Splitwise, Vidur or BurstGPT
    CSV; Mooncake or Qwen-Bailian JSON lines; ShareGPT JSON. With
      rate=4            another mean rate: times stretched, or poisson for a trace without times
      jitter=auto       requests of one tick spread over it: on, off, the tick's seconds; auto: in JSON lines

    Either, in this order:
      from=60, until=120  a window of its seconds
      first=1000          its first requests
      clip=32768          prompts, then answers, cut to a context
      speed=2             all times divided by it; last of all

    The same line and seed give the same workload. Of ShareGPT's texts 4 characters count as a token. Raises
    `WorkloadError`, with file and line where there is one.
    """
    parts = [source] if os.path.exists(source) else [part.strip() for part in source.split(" + ")]
    phases = [_phase(part, seed + _SEED_STRIDE * number) for number, part in enumerate(parts)]
    return phases[0].workload if len(phases) == 1 else changes.concatenated(phases)


def _phase(text: str, seed: int) -> WorkloadPhase:
    head, rest = split(text)
    if head in _PROCESSES:
        return _synthetic(text, head, rest, seed)
    if os.path.exists(head):
        return _trace(Path(head), parse_options(rest, FOR_TRACES, head), seed)
    near = difflib.get_close_matches(head, _PROCESSES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"processes are {', '.join(_PROCESSES)}"
    raise WorkloadError(f"{head!r} is neither a trace file nor a process of arrivals; {hint}")


def _part(workload: Workload, options: WorkloadOptions) -> Workload:
    """The selected requests, with clipped lengths."""
    if options.begin is not None or options.until is not None:
        workload = changes.window(workload, options.begin or 0.0, options.until or math.inf)
    if options.first is not None:
        workload = changes.first(workload, options.first)
    if options.clip is not None:
        workload = changes.clipped(workload, options.clip)
    return workload


def _paced(workload: Workload, options: WorkloadOptions, end_s: float | None) -> WorkloadPhase:
    """Apply the speed; with `end_s`, the phase has a fixed duration."""
    speed = options.speed or 1.0
    seconds = None if end_s is None else (end_s - (options.begin or 0.0)) / speed
    return WorkloadPhase(workload if options.speed is None else changes.faster(workload, speed), seconds)


def _synthetic(text: str, head: str, rest: str, seed: int) -> WorkloadPhase:
    process, own = _PROCESSES[head]
    timeless = head == "burst"
    options = parse_options(
        rest, (*own, *(key for key in FOR_ALL_PROCESSES if not timeless or key not in _OF_TIME)), head
    )
    if options.lengths is None:
        raise WorkloadError(f"{head} needs lengths, such as lengths=mixed or lengths=1500-2000/500")
    if options.rate is None and not timeless:
        raise WorkloadError(f"{head} needs a rate in requests a second, such as rate=4")
    if options.count is None and options.duration is None:
        raise WorkloadError(
            f"{head} needs an end: count=500 (requests){'' if timeless else ' or duration=300 (seconds)'}"
        )
    if options.count is None and (options.rate or 0.0) * (options.duration or 0.0) > MAX_REQUESTS:
        raise WorkloadError(f"{head}: rate times duration is more than {MAX_REQUESTS:,} requests; ask for fewer")
    set_ones = {name: value for key, name in own.items() if (value := getattr(options, key)) is not None}
    made = changes.synthetic(
        text,
        process(options.rate, **set_ones),
        _lengths(options.lengths, seed),
        key=os.path.basename(options.lengths) if os.path.exists(options.lengths) else options.lengths,
        seed=seed,
        count=options.count,
        duration_s=options.duration,
    )
    ends = [end_s for end_s in (options.duration, options.until) if end_s is not None]
    return _paced(_part(made, options), options, min(ends, default=None))


def _lengths(text: str, seed: int) -> Lengths:
    if found := parse_lengths(text):
        return found
    if os.path.exists(text):
        return Resampled.of(collect(Path(text), WorkloadOptions(), seed).arrivals)
    raise WorkloadError(
        f"lengths={text} are neither {', '.join(MIXES)}, nor PROMPT/OUTPUT in tokens (1500/200, 1500-2000/500, "
        "4x64/48+1024/48), nor a trace file"
    )


def _trace(path: Path, options: WorkloadOptions, seed: int) -> WorkloadPhase:
    workload = _part(collect(path, options, seed), options)
    retimed = _retimed(workload, options.rate, seed)
    return _paced(retimed, options, options.until if retimed is workload else None)


def _retimed(workload: Workload, rate: float | None, seed: int) -> Workload:
    """With another mean rate. A trace without times needs one, and gets Poisson arrivals."""
    if workload.rate:
        return workload if rate is None else changes.at_rate(workload, rate)
    if len(workload.arrivals) == 1:
        return workload
    if rate is None:
        raise WorkloadError(f"{workload.name}: all its requests have one time, or none; add a rate, such as rate=4")
    return changes.redrawn(workload, rate, seed)


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
