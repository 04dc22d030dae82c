"""One candidate under one load: what it attains at a rate; and without simulation, how much at most, if anything.

Runs anywhere: a trial is a value, so it can be sent to another process.
"""

import math
from dataclasses import dataclass, replace

from cluster.plan.asked import Asked
from cluster.plan.capacity import capacity
from cluster.plan.deploy import Group, Layout, case_of, decode_alone, prefill_alone
from cluster.plan.load import Load, Phase
from cluster.scoring.figures import Attainment, attainment
from cluster.scoring.records import Run
from cluster.sim.compare import Case
from cluster.sim.run import Options, simulate
from cluster.spec import PoolSpec, Role
from cluster.workload.arrivals import Arrival, Workload
from workers.costs import CostModel
from workers.request import SLO

MOST_REQUESTS = 8  # a run at a high rate has so many times the requests asked for, at most
TTFTS, ANSWERS = 10, 2  # promises for which a run must last
MARGIN = 0.05  # a draw of some hundred requests attains by so much more than all of them would, at most


@dataclass(frozen=True, slots=True)
class Trial:
    """`estimate`: requests a second that it should be able to serve, `most`: that nothing lets it exceed. `alone`:
    share of requests that would meet the promise if each had the machine to itself; no load attains more. `weight`: its
    GPUs as the objective counts them. `give_up`: a run ends once it cannot attain this share any more.
    """

    layout: Layout
    case: Case
    load: Load
    phase: Phase
    slo: SLO
    requests: int
    gpus: int
    weight: float
    estimate: float
    most: float
    alone: float
    give_up: float | None = None

    @property
    def name(self) -> str:
        return (
            self.layout.told if self.phase is Phase.WHOLE else f"{self.layout.groups[0].told}, {self.phase.value} alone"
        )

    def __call__(self, rate: float, seed: int) -> Attainment:
        return attainment(self.run(rate, seed), self.slo)

    def run(self, rate: float, seed: int) -> Run:
        count = min(self.requests * MOST_REQUESTS, max(self.requests, math.ceil(rate * self.span_s)))
        workload = self.load.at(rate, seed, count, self.phase)
        missed = None if self.give_up is None else int((1.0 - self.give_up) * len(workload.arrivals))
        until_s = promised_end_s(workload, self.slo)
        options = Options(seed=seed, slo=self.slo, until_s=until_s, most_missed=missed, system=self.name)
        return simulate(self.case.spec, self.case.models, workload, options)

    @property
    def span_s(self) -> float:
        """A run has at least the requests of this time: a queue that grows needs time to break a promise."""
        arrivals = self.load.arrivals
        answer = (
            sum(each.output_tokens for each in arrivals) / len(arrivals) if self.phase is not Phase.PREFILL else 1.0
        )
        return TTFTS * (self.slo.ttft_s or 0.0) + ANSWERS * answer * (self.slo.tpot_s or 0.0)


def promised_end_s(workload: Workload, slo: SLO) -> float | None:
    """After this no request can keep its promise any more: whoever is not done has missed it. None: never."""
    ttft_s, tpot_s = slo.ttft_s, slo.tpot_s
    if ttft_s is None or tpot_s is None:
        return None
    ends = (each.at_s + ttft_s + tpot_s * (each.output_tokens - 1) for each in workload.arrivals)
    return max(ends) - workload.arrivals[0].at_s + 1e-6


def whole(asked: Asked, layout: Layout) -> Trial:
    """Raises `DoesNotFit` and `ProfileError`, as all of these."""
    weight = sum(group.gpus * asked.weight(group.hardware) for group in layout.groups)
    case, pools = case_of(asked, layout), tuple(group.role.value for group in layout.groups)
    return _trial(asked, layout, case, Phase.WHOLE, asked.slo, weight, pools)


def prefill(asked: Asked, group: Group) -> Trial:
    """A prefill instance alone, against TTFT."""
    return _phase(asked, group, Phase.PREFILL, prefill_alone(asked, group), replace(asked.slo, tpot_s=None), "mixed")


def decode(asked: Asked, group: Group) -> Trial:
    """A decode instance alone, against TPOT; and against TTFT, which here is what its promise of blocks takes: that
    comes before the prompt is computed, so an instance that is full shows there and not in TPOT."""
    return _phase(asked, group, Phase.DECODE, decode_alone(asked, group), asked.slo, "decode")


def _phase(asked: Asked, group: Group, phase: Phase, case: Case, slo: SLO, pool: str) -> Trial:
    layout = Layout("split", (replace(group, replicas=1),))
    return _trial(asked, layout, case, phase, slo, group.gpus_each * asked.weight(group.hardware), (pool,))


def _trial(
    asked: Asked, layout: Layout, case: Case, phase: Phase, slo: SLO, weight: float, pools: tuple[str, ...]
) -> Trial:
    arrivals = asked.load.arrivals
    if phase is Phase.PREFILL:
        arrivals = tuple(replace(each, output_tokens=1) for each in arrivals)
    bounds = [
        (capacity(pool, case.models[pool.name].cost, arrivals, asked.slo.tpot_s), pool)
        for pool in case.spec.pools
        if pool.name in pools
    ]
    return Trial(
        *(layout, case, asked.load, phase, slo, asked.requests, layout.gpus, weight),
        estimate=min(bound.usual for bound, _ in bounds),
        most=min(bound.most for bound, _ in bounds),
        alone=min(_alone(pool, case.models[pool.name].cost, arrivals, slo) for _, pool in bounds),
    )


def _alone(pool: PoolSpec, cost: CostModel, arrivals: tuple[Arrival, ...], slo: SLO) -> float:
    """Stages can share a prompt, but not a token."""

    def kept(each: Arrival) -> bool:
        prefills, decodes = pool.role is not Role.DECODE, pool.role is not Role.PREFILL and each.output_tokens > 1
        in_time = cost.prefill_seconds(each.prompt_tokens) / pool.parallel.pipeline if prefills else 0.0
        token_s = cost.decode_seconds(1, each.prompt_tokens) if decodes else 0.0
        return (slo.ttft_s is None or in_time <= slo.ttft_s) and (slo.tpot_s is None or token_s <= slo.tpot_s)

    return sum(map(kept, arrivals)) / len(arrivals)
