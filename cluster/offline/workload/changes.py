"""Changes of a workload: another rate, a part of it, other lengths, concatenation. Pure; random draws are seeded.

Each returns a new workload with a note. Lengths, prefixes and sessions stay with their requests unless the note says
otherwise.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, takewhile
from operator import attrgetter
from statistics import median

from cluster.offline.workload.arrivals import MAX_REQUESTS, Arrival, Workload, WorkloadError
from cluster.offline.workload.lengths import Lengths, Resampled
from cluster.offline.workload.processes import Process, poisson

_IDS_BITS = 40  # of prefix blocks in one workload
TURNS_PER_SEED = 1024


def synthetic(
    name: str,
    process: Process,
    lengths: Lengths,
    *,
    key: str,
    seed: int,
    count: int | None = None,
    duration_s: float | None = None,
) -> Workload:
    """Generate requests until there are `count` or `duration_s` has passed, whichever comes first.

    `key` and `seed` seed the draws: equal ones give the same lengths in the same order at every rate.
    """
    source, gaps = random.Random(f"{key}, lengths, {seed}"), random.Random(f"{key}, gaps, {seed}")
    times = process(gaps)
    if duration_s is not None:
        end_s = duration_s
        times = takewhile(lambda at_s: at_s < end_s, times)
    wanted = MAX_REQUESTS + 1 if count is None else min(count, MAX_REQUESTS + 1)
    arrivals = tuple(Arrival(at_s, *lengths.draw(source)) for _, at_s in zip(range(wanted), times, strict=False))
    if len(arrivals) > MAX_REQUESTS:
        raise WorkloadError(f"{name}: more than {MAX_REQUESTS:,} requests; ask for fewer by count, rate or duration")
    return Workload(name, arrivals)


def faster(workload: Workload, factor: float) -> Workload:
    """All times divided by the factor."""
    return _divided(workload, factor, f"{factor:.4g} times as fast")


def at_rate(workload: Workload, rate: float) -> Workload:
    """Times scaled to a mean of `rate` requests/s; bursts stay bursts."""
    if not workload.rate:
        raise WorkloadError(
            f"{workload.name}: its requests arrive all at once: there is no rate to scale; add arrivals="
        )
    factor = rate / workload.rate
    return _divided(workload, factor, f"{factor:.4g} times as fast, which is {rate:g} requests a second")


def _divided(workload: Workload, factor: float, note: str) -> Workload:
    if not 0.0 < factor < math.inf:
        raise WorkloadError(f"{workload.name} cannot be {note}; rates and factors are above 0")
    return workload.with_note([replace(each, at_s=each.at_s / factor) for each in workload.arrivals], note)


def redrawn(workload: Workload, rate: float, seed: int) -> Workload:
    """The same requests in the same order at Poisson times, as in the Splitwise study."""
    times = poisson(rate)(random.Random(f"{workload.name}, gaps, {seed}"))
    moved = [replace(each, at_s=at_s) for each, at_s in zip(workload.arrivals, times, strict=False)]
    return workload.with_note(moved, f"arrivals generated again: Poisson at {rate:g}/s")


def resampled(workload: Workload, count: int, rate: float, seed: int) -> Workload:
    """`count` requests with lengths drawn from this workload's, Poisson at `rate`. They share no prefixes."""
    lengths = Resampled.of(workload.arrivals)
    sample = synthetic(workload.name, poisson(rate), lengths, key=workload.name, seed=seed, count=count)
    return workload.with_note(sample.arrivals, f"{count} requests with lengths drawn from it, Poisson at {rate:g}/s")


def tick_s(times: Sequence[float]) -> float:
    """The resolution to which sorted times were rounded: the median gap between different ones; 0 if few are equal."""
    different = [at_s for at_s, _ in groupby(times)]
    if len(different) < 2 or 2 * len(different) > len(times):
        return 0.0
    return median(later - sooner for sooner, later in pairwise(different))


def jittered(workload: Workload, tick: float, seed: int) -> Workload:
    """Spread requests with the same time uniformly over the next `tick` seconds, or up to the next time if sooner.

    Keeps the order. Undoes the rounding of a trace's times, which would otherwise look like bursts.
    """
    if not tick > 0:
        raise WorkloadError(f"{workload.name}: jitter needs a tick above 0 s, got {tick:g}")
    source = random.Random(f"{workload.name}, jitter, {seed}")
    ticks = [list(each) for _, each in groupby(workload.arrivals, attrgetter("at_s"))]
    nexts = [*(each[0].at_s for each in ticks[1:]), float("inf")]
    moved: list[Arrival] = []
    for together, next_s in zip(ticks, nexts, strict=True):
        begin_s = together[0].at_s
        room_s = min(tick, next_s - begin_s)
        offsets = sorted(source.random() * room_s for _ in together)
        moved += [replace(each, at_s=min(begin_s + off, next_s)) for each, off in zip(together, offsets, strict=True)]
    return workload.with_note(moved, f"spread evenly inside ticks of {tick:.4g} s (seed {seed})")


def first(workload: Workload, count: int) -> Workload:
    """The first `count` requests; all, if there are fewer."""
    if count > len(workload.arrivals):
        return workload
    return workload.with_note(workload.arrivals[: max(count, 0)], f"the first {count} requests")


def window(workload: Workload, begin_s: float, end_s: float) -> Workload:
    """Requests from `begin_s` to before `end_s`, with times counted from `begin_s`."""
    kept = [replace(each, at_s=each.at_s - begin_s) for each in workload.arrivals if begin_s <= each.at_s < end_s]
    if not kept:
        raise WorkloadError(
            f"{workload.name} has no requests from {begin_s:g} s to {end_s:g} s; its last arrives at "
            f"{workload.arrivals[-1].at_s:g} s"
        )
    return workload.with_note(kept, f"from {begin_s:g} s to {end_s:g} s")


def clipped(workload: Workload, context_tokens: int) -> Workload:
    """Cut requests that are longer than the context: the end of the prompt first, then the output."""
    if context_tokens < 2:
        raise WorkloadError(f"{workload.name}: a context has at least 2 tokens, got {context_tokens}")
    cut = [_clip(each, context_tokens, workload.block_tokens) for each in workload.arrivals]
    count = sum(new is not old for new, old in zip(cut, workload.arrivals, strict=True))
    return (
        workload.with_note(cut, f"{count} of {len(cut)} requests clipped to {context_tokens} tokens")
        if count
        else workload
    )


def _clip(arrival: Arrival, context_tokens: int, block_tokens: int) -> Arrival:
    if arrival.prompt_tokens + arrival.output_tokens <= context_tokens:
        return arrival
    output = min(arrival.output_tokens, context_tokens - 1)
    prompt = min(arrival.prompt_tokens, context_tokens - output)
    blocks = -(-prompt // block_tokens)
    return replace(arrival, prompt_tokens=prompt, output_tokens=output, prefix=arrival.prefix[:blocks])


def with_distinct_prompts(workload: Workload, number: int) -> Workload:
    """The same requests with prompts that differ from those of every other `number`, so that one run's prefix cache
    does not serve the next run.

    Sharing within the workload stays. Adds no note. `number` is below 2**30.
    """
    ids: dict[int, int] = {}
    base = number << _IDS_BITS
    named = []
    for index, each in enumerate(workload.arrivals):
        blocks = each.prefix or (-1 - index,)
        named.append(replace(each, prefix=tuple(base + ids.setdefault(block, len(ids)) for block in blocks)))
    return replace(workload, arrivals=tuple(named))


def run_number(seed: int, turn: int) -> int:
    """A distinct number for `with_distinct_prompts` for each seed and turn."""
    return (seed % 2**19) * TURNS_PER_SEED + turn % TURNS_PER_SEED


@dataclass(frozen=True, slots=True)
class WorkloadPhase:
    """A part of a longer workload. `seconds` until the next begins; None: one mean gap after its last arrival."""

    workload: Workload
    seconds: float | None = None

    @property
    def span_s(self) -> float:
        last_s = self.workload.arrivals[-1].at_s
        if self.seconds is None:
            return last_s + (1.0 / self.workload.rate if self.workload.rate else 0.0)
        if self.seconds < last_s:
            raise WorkloadError(
                f"{self.workload.name}: its last request arrives at {last_s:g} s, after {self.seconds:g} s"
            )
        return self.seconds


def concatenated(phases: Sequence[WorkloadPhase]) -> Workload:
    """Run phases one after another. Prefixes are shared within a phase and between phases of the same name."""
    sizes = {each.workload.block_tokens for each in phases if any(one.prefix for one in each.workload.arrivals)}
    if len(sizes) > 1:
        raise WorkloadError(f"phases with prefix blocks of {sorted(sizes)} tokens cannot follow one another")
    ids: dict[str, int] = {}  # workload name -> number of prefix ids
    for phase in phases:
        used = max((max(each.prefix) + 1 for each in phase.workload.arrivals if each.prefix), default=0)
        ids[phase.workload.name] = max(used, ids.get(phase.workload.name, 0))
    shifts = dict(zip(ids, accumulate(ids.values(), initial=0), strict=False))
    arrivals: list[Arrival] = []
    begin_s = 0.0
    for phase in phases:
        part = phase.workload
        for each in part.arrivals:
            prefix = tuple(block + shifts[part.name] for block in each.prefix)
            arrivals.append(replace(each, at_s=begin_s + each.at_s, prefix=prefix))
        begin_s += phase.span_s
    parts = [each.workload for each in phases]
    notes = tuple(dict.fromkeys(f"{part.name}: {note}" for part in parts for note in part.notes))
    size = sizes.pop() if sizes else parts[0].block_tokens
    return Workload(" + ".join(part.name for part in parts), tuple(arrivals), size, notes)
