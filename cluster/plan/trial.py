"""One candidate under one load: what it attains at a rate; and without simulation, how much at most, if anything.

Runs anywhere: a trial is a value, so it can be sent to another process.
"""

from dataclasses import dataclass, replace

from cluster.plan.asked import Asked
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

MOST_REQUESTS = 4  # a large cluster's run has so many times the requests of one instance's
MARGIN = 0.05  # a draw of some hundred requests attains by so much more than all of them would, at most


@dataclass(frozen=True, slots=True)
class Trial:
    """`estimate`: requests a second that it could serve were it never idle. `alone`: share of requests that would meet
    the promise if each had the machine to itself; no load attains more. `weight`: its GPUs as the objective counts them.
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
    alone: float

    @property
    def name(self) -> str:
        return (
            self.layout.told if self.phase is Phase.WHOLE else f"{self.layout.groups[0].told}, {self.phase.value} alone"
        )

    def __call__(self, rate: float, seed: int) -> Attainment:
        return attainment(self.run(rate, seed), self.slo)

    def run(self, rate: float, seed: int) -> Run:
        workload = self.load.at(rate, seed, self.requests, self.phase)
        options = Options(seed=seed, slo=self.slo, until_s=promised_end_s(workload, self.slo), system=self.name)
        return simulate(self.case.spec, self.case.models, workload, options)


def promised_end_s(workload: Workload, slo: SLO) -> float | None:
    """After this no request can keep its promise any more: whoever is not done has missed it. None: never."""
    ttft_s, tpot_s = slo.ttft_s, slo.tpot_s
    if ttft_s is None or tpot_s is None:
        return None
    ends = (each.at_s + ttft_s + tpot_s * (each.output_tokens - 1) for each in workload.arrivals)
    return max(ends) - workload.arrivals[0].at_s + 1e-6


def whole(asked: Asked, layout: Layout) -> Trial:
    """Raises `DoesNotFit` and `ProfileError`, as all of these."""
    case = case_of(asked, layout)
    requests = asked.requests * min(MOST_REQUESTS, max(group.replicas for group in layout.groups))
    weight = sum(group.gpus * asked.weight(group.hardware) for group in layout.groups)
    rates, shares = [], []
    for pool in case.spec.pools:
        cost = case.models[pool.name].cost
        rates.append(_pool_rate(asked, pool, cost, asked.load.arrivals))
        shares.append(_alone(pool, cost, asked.load.arrivals, asked.slo))
    return Trial(
        *(layout, case, asked.load, Phase.WHOLE, asked.slo, requests, layout.gpus, weight),
        *(min(rates), min(shares)),
    )


def prefill(asked: Asked, group: Group) -> Trial:
    """A prefill instance alone, against TTFT."""
    return _phase(asked, group, Phase.PREFILL, prefill_alone(asked, group), replace(asked.slo, tpot_s=None), "mixed")


def decode(asked: Asked, group: Group) -> Trial:
    """A decode instance alone, against TPOT; and against TTFT, which here is what its promise of blocks takes: that
    comes before the prompt is computed, so an instance that is full shows there and not in TPOT."""
    return _phase(asked, group, Phase.DECODE, decode_alone(asked, group), asked.slo, "decode")


def _phase(asked: Asked, group: Group, phase: Phase, case: Case, slo: SLO, pool: str) -> Trial:
    spec = next(each for each in case.spec.pools if each.name == pool)
    arrivals = asked.load.arrivals
    if phase is Phase.PREFILL:
        arrivals = tuple(replace(each, output_tokens=1) for each in arrivals)
    cost = case.models[pool].cost
    rate, alone = _pool_rate(asked, spec, cost, arrivals), _alone(spec, cost, arrivals, slo)
    gpus = group.gpus_each
    layout = Layout("split", (replace(group, replicas=1),))
    weight = gpus * asked.weight(group.hardware)
    return Trial(layout, case, asked.load, phase, slo, asked.requests, gpus, weight, rate, alone)


def _pool_rate(asked: Asked, pool: PoolSpec, cost: CostModel, arrivals: tuple[Arrival, ...]) -> float:
    """Requests a second of a pool that is never idle: mean requests, prompts in full steps, decodes in the largest
    batch that keeps TPOT and fits. A worker of both phases hides the shorter one behind the longer, at best."""
    engine = pool.engine
    prompt = round(sum(each.prompt_tokens for each in arrivals) / len(arrivals))
    output = sum(each.output_tokens for each in arrivals) / len(arrivals)
    context = prompt + round(output / 2)
    prefill_s = decode_s = 0.0
    if pool.role is not Role.DECODE:
        together = max(1, engine.max_batch_tokens // prompt)
        prefill_s = cost.mixed_seconds(((prompt, 0),) * together, 0, 0) / together
    if pool.role is not Role.PREFILL and output > 1:
        most = max(1, min(engine.max_running, engine.kv_blocks * engine.block_size // context))
        batch = _largest_batch(cost, most, context, asked.slo.tpot_s)
        decode_s = output * cost.decode_seconds(batch, batch * context) / batch
    return pool.replicas * pool.parallel.pipeline / max(prefill_s, decode_s, 1e-9)


def _largest_batch(cost: CostModel, most: int, context: int, tpot_s: float | None) -> int:
    least, above = 1, most + 1
    while tpot_s is not None and above - least > 1:
        middle = (least + above) // 2
        within = cost.decode_seconds(middle, middle * context) <= tpot_s
        least, above = (middle, above) if within else (least, middle)
    return least if tpot_s is not None else most


def _alone(pool: PoolSpec, cost: CostModel, arrivals: tuple[Arrival, ...], slo: SLO) -> float:
    """Stages can share a prompt, but not a token."""

    def kept(each: Arrival) -> bool:
        prefills, decodes = pool.role is not Role.DECODE, pool.role is not Role.PREFILL and each.output_tokens > 1
        in_time = cost.prefill_seconds(each.prompt_tokens) / pool.parallel.pipeline if prefills else 0.0
        token_s = cost.decode_seconds(1, each.prompt_tokens) if decodes else 0.0
        return (slo.ttft_s is None or in_time <= slo.ttft_s) and (slo.tpot_s is None or token_s <= slo.tpot_s)

    return sum(map(kept, arrivals)) / len(arrivals)
