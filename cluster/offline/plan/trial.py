"""One candidate under one load: what it attains at a rate; and without simulation, how much at most, if anything.

Runs anywhere: a trial is a value, so it can be sent to another process.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.offline.plan.asked import PlanRequest
from cluster.offline.plan.deploy import Layout, WorkerGroup, case_of, decode_alone, prefill_alone
from cluster.offline.plan.load import PlanLoad
from cluster.offline.scoring.figures import Attainment, attainment
from cluster.offline.scoring.records import RequestOutcome, Run, Served
from cluster.offline.sim.compare import Case
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.spec import PoolSpec, Role
from workers.costs import CostModel
from workers.request import SLO

MOST_REQUESTS = 8  # a run at a high rate has so many times the requests asked for, at most
TTFTS, ANSWERS = 10, 2  # promises for which a run must last
MARGIN = 0.05  # a draw of some hundred requests attains by so much more than all of them would, at most


class TrialTerms(Protocol):
    """What of a question a trial needs; see `PlanRequest`."""

    @property
    def load(self) -> PlanLoad: ...
    @property
    def slo(self) -> SLO: ...
    @property
    def target(self) -> float: ...
    @property
    def requests(self) -> int: ...
    def weight(self, hardware: str) -> float: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """`estimate`: requests a second that it should be able to serve, `most`: that nothing lets it exceed. `alone`:
    share of requests that would meet the promise if each had the machine to itself; no load attains more. `weight`: its
    GPUs as the objective counts them. `give_up`: a run ends once it cannot attain this share any more;
    `cut`: and once nobody who is left can keep the promise.
    """

    layout: Layout
    case: Case
    load: PlanLoad
    slo: SLO
    requests: int
    gpus: int
    weight: float
    estimate: float
    most: float
    alone: float
    give_up: float | None = None
    cut: bool = True

    @property
    def name(self) -> str:
        return self.case.name

    def __call__(self, rate: float, seed: int) -> Attainment:
        made = self.run(rate, seed)
        attained = attainment(made, self.slo)
        if self.give_up is None or attained.both >= self.give_up:
            return attained
        given_up = decided(made, self.slo)
        return given_up if given_up.both < self.give_up else attained

    def run(self, rate: float, seed: int) -> Run:
        count = min(self.requests * MOST_REQUESTS, max(self.requests, math.ceil(rate * self.span_s)))
        workload = self.load.at(rate, seed, count)
        missed = None if self.give_up is None else int((1.0 - self.give_up) * len(workload.arrivals))
        until_s = promised_end_s(workload, self.slo) if self.cut else None
        options = RunOptions(seed=seed, slo=self.slo, until_s=until_s, most_missed=missed, system=self.name)
        with _quietly:
            return simulate(self.case.spec, self.case.models, workload, options)

    @property
    def span_s(self) -> float:
        """A run has at least the requests of this time: a queue that grows needs time to break a promise."""
        arrivals = self.load.arrivals
        answer = sum(each.output_tokens for each in arrivals) / len(arrivals)
        return TTFTS * (self.slo.ttft_s or 0.0) + ANSWERS * answer * (self.slo.tpot_s or 0.0)


class _Quiet:
    """Requests that fail in an overload are what is looked for, and nothing to warn of. Runs of several threads may
    overlap: the last to end restores what the first found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._runs:
                self._before = logging.root.manager.disable
                logging.disable(logging.WARNING)
            self._runs += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._runs -= 1
            if not self._runs:
                logging.disable(self._before)


_quietly = _Quiet()


def decided(run: Run, slo: SLO) -> Attainment:
    """Of a run that was given up: the shares of the requests that had ended or missed a promise by then. The others
    would seem to have missed both."""
    now_s = max((each.token_s[-1] for each in run.served if len(each.token_s)), default=0.0)
    told = [each for each in (_fate(one, slo, now_s) for one in run.served) if each is not None]
    if not told:
        return attainment(run, slo)
    ttft, tpot = (sum(each[number] for each in told) / len(told) for number in (0, 1))
    served = sum(each.ending in (RequestOutcome.FINISHED, RequestOutcome.UNFINISHED) for each in run.served) / len(
        run.served
    )
    return Attainment(ttft, tpot, sum(all(each) for each in told) / len(told), served)


def _fate(each: Served, slo: SLO, now_s: float) -> tuple[bool, bool] | None:
    """Whether TTFT and TPOT were kept, as far as it came; None: nobody knows yet."""
    if each.ending is not RequestOutcome.UNFINISHED:
        done = each.ending is RequestOutcome.FINISHED
        return (
            done and _within(each.ttft_s, slo.ttft_s),
            done and (each.output_tokens <= 1 or _within(each.tpot_s, slo.tpot_s)),
        )
    first_s = each.token_s[0] if len(each.token_s) else now_s
    in_time = _within(first_s - each.arrival_s, slo.ttft_s)
    fluent = _within(now_s - first_s, (slo.tpot_s or math.inf) * (each.output_tokens - 1))
    return None if in_time and fluent else (in_time, fluent)


def _within(seconds: float | None, most_s: float | None) -> bool:
    return most_s is None or (seconds is not None and seconds <= most_s)


def promised_end_s(workload: Workload, slo: SLO) -> float | None:
    """After this no request can keep its promise any more: whoever is not done has missed it. None: never."""
    ttft_s, tpot_s = slo.ttft_s, slo.tpot_s
    if ttft_s is None or tpot_s is None:
        return None
    ends = (each.at_s + ttft_s + tpot_s * (each.output_tokens - 1) for each in workload.arrivals)
    return max(ends) - workload.arrivals[0].at_s + 1e-6


def whole(asked: PlanRequest, layout: Layout) -> Trial:
    """Raises `DoesNotFit` and `ProfileError`, as all of these."""
    return trial_of(asked, case_of(asked, layout), layout)


def prefill(asked: PlanRequest, group: WorkerGroup) -> Trial:
    """A prefill instance alone, against TTFT."""
    of_one = replace(asked.load, one_token=True)
    slo = replace(asked.slo, tpot_s=None)
    return trial_of(asked, prefill_alone(asked, group), _only(group), load=of_one, slo=slo)


def decode(asked: PlanRequest, group: WorkerGroup) -> Trial:
    """A decode instance alone, against TPOT; and against TTFT, which here is what its promise of blocks takes: that
    comes before the prompt is computed, so an instance that is full shows there and not in TPOT."""
    return trial_of(asked, decode_alone(asked, group), _only(group), pool="decode")


def _only(group: WorkerGroup) -> Layout:
    return Layout("split", (replace(group, replicas=1),))


def trial_of(
    asked: TrialTerms,
    case: Case,
    layout: Layout,
    *,
    load: PlanLoad | None = None,
    slo: SLO | None = None,
    pool: str = "",
) -> Trial:
    """`pool`: the only one whose seconds count; else all do."""
    load, slo = load or asked.load, slo or asked.slo
    weight = sum(group.gpus * asked.weight(group.hardware) for group in layout.groups) or float(case.gpus)
    pools = [each for each in case.spec.pools if pool in ("", each.name)]
    arrivals = load.arrivals
    costs = {each.name: case.models[each.name].cost for each in pools}

    def usual(each: PoolSpec) -> float:
        busy = _busy(each, costs[each.name], arrivals, slo, asked.target)
        return capacity(each, costs[each.name], arrivals, slo.tpot_s).usual * busy

    return Trial(
        *(layout, case, load, slo, asked.requests, layout.gpus or case.gpus, weight),
        estimate=_together(pools, usual),
        most=min(
            sum(capacity(each, costs[each.name], arrivals, slo.tpot_s).most for each in phase)
            for phase in _phases(pools)
        ),
        alone=_alone(_phases(pools), costs, arrivals, slo),
    )


def _phases(pools: Sequence[PoolSpec]) -> list[list[PoolSpec]]:
    """Who can prefill, and who can decode, as if there for nothing else; a phase that nobody can do is left out."""
    able = [
        [replace(each, role=phase) for each in pools if each.role in (phase, Role.MIXED)]
        for phase in (Role.PREFILL, Role.DECODE)
    ]
    return [each for each in able if each]


def _together(pools: Sequence[PoolSpec], rate: Callable[[PoolSpec], float]) -> float:
    """Pools of one role add up, also unlike ones; of a split, the phase that serves less counts."""
    served = {role: [rate(each) for each in pools if each.role is role] for role in Role}
    split = [sum(served[role]) for role in (Role.PREFILL, Role.DECODE) if served[role]]
    return sum(served[Role.MIXED]) + min(split, default=0.0)


def _busy(pool: PoolSpec, cost: CostModel, arrivals: Sequence[Arrival], slo: SLO, target: float) -> float:
    """The share of time that prompts may keep the pool busy, so that the slowest of the target still come in time: the
    wait in M/D/1 is on average half a prompt's time over the idle share, and one in ten waits for about twice that."""
    if pool.role is Role.DECODE or slo.ttft_s is None:
        return 1.0
    alone = sorted(cost.prefill_seconds(each.prompt_tokens) / pool.parallel.pipeline for each in arrivals)
    slowest_s = alone[min(len(alone) - 1, int(target * len(alone)))]
    left_s = max(slo.ttft_s - slowest_s, 0.01 * slo.ttft_s)
    return left_s / (left_s + sum(alone) / len(alone))


def _alone(
    phases: Sequence[Sequence[PoolSpec]], costs: Mapping[str, CostModel], arrivals: Sequence[Arrival], slo: SLO
) -> float:
    """Stages can share a prompt, but not a token. What does not fit in the KV is not served at all."""

    def kept(pool: PoolSpec, each: Arrival) -> bool:
        cost = costs[pool.name]
        if each.prompt_tokens + each.output_tokens > pool.engine.kv_blocks * pool.engine.block_size:
            return False
        if pool.role is Role.PREFILL:
            return slo.ttft_s is None or cost.prefill_seconds(each.prompt_tokens) / pool.parallel.pipeline <= slo.ttft_s
        is_one = each.output_tokens <= 1
        return is_one or slo.tpot_s is None or cost.decode_seconds(1, each.prompt_tokens) <= slo.tpot_s

    return sum(all(any(kept(pool, each) for pool in phase) for phase in phases) for each in arrivals) / len(arrivals)


LEAST_CHUNK = 16  # prompt tokens beside decodes


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second of the mean request: what is likely, and what no order of steps exceeds."""

    usual: float
    most: float


def capacity(pool: PoolSpec, cost: CostModel, arrivals: Sequence[Arrival], tpot_s: float | None) -> Capacity:
    """Prompts in full steps, decodes in the largest batch that fits and keeps TPOT.

    A worker of both phases hides the shorter one behind the longer at best; usually a step holds as many decodes for
    its prompt tokens as requests have output for theirs.
    """
    engine = pool.engine
    prompt = round(sum(each.prompt_tokens for each in arrivals) / len(arrivals))
    output = sum(each.output_tokens for each in arrivals) / len(arrivals)
    context = prompt + round(output / 2)
    stages = pool.replicas * pool.parallel.pipeline
    prefill_s = decode_s = 0.0
    if pool.role is not Role.DECODE:
        together = max(1, engine.max_batch_tokens // prompt)
        prefill_s = cost.mixed_seconds(((prompt, 0),) * together, 0, 0) / together
    if pool.role is Role.PREFILL or output <= 1:
        return _same(stages / max(prefill_s, 1e-9))
    most = max(1, min(engine.max_running, engine.kv_blocks * engine.block_size // context))
    batch = _largest_batch(cost, most, context, tpot_s)
    decode_s = output * cost.decode_seconds(batch, batch * context) / batch
    bound = stages / max(prefill_s, decode_s, 1e-9)
    if pool.role is Role.DECODE:
        return _same(bound)
    usual = stages * _fused(cost, prompt, output, context, engine.max_batch_tokens, most, tpot_s)
    return Capacity(min(usual, bound), bound)


def _same(rate: float) -> Capacity:
    return Capacity(rate, rate)


def _largest_batch(cost: CostModel, most: int, context: int, tpot_s: float | None) -> int:
    if tpot_s is None:
        return most
    least, above = 1, most + 1
    while above - least > 1:
        middle = (least + above) // 2
        within = cost.decode_seconds(middle, middle * context) <= tpot_s
        least, above = (middle, above) if within else (least, middle)
    return least


def _fused(
    cost: CostModel, prompt: int, output: float, context: int, tokens: int, most: int, tpot_s: float | None
) -> float:
    """With the chunk that serves most of those whose steps keep TPOT; the smallest one when none does."""
    rate, chunk = 0.0, tokens
    while chunk >= LEAST_CHUNK:
        batch = max(1, min(most, round(chunk * output / prompt)))
        step_s = cost.mixed_seconds(((min(chunk, prompt), prompt // 2),), batch, batch * context)
        served = min(min(chunk, prompt) / prompt, batch / output) / step_s
        if tpot_s is None or step_s <= tpot_s:
            rate = max(rate, served)
        chunk //= 2
    return rate or served
