"""One candidate under one load: its attainment at a rate by simulation, and closed-form bounds on it.

A trial is a picklable value, so any process can run it. An option is a layout that was simulated whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from cluster.offline.plan.deploy import Layout, WorkerGroup, case_of, decode_alone, prefill_alone
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.request import PlanRequest
from cluster.offline.scoring.figures import Attainment, attainment, judged, most_missed
from cluster.offline.scoring.goodput import Goodput, probe_span_s
from cluster.offline.scoring.records import Run
from cluster.offline.sim.case import Case
from cluster.offline.workload.arrivals import Arrival, Workload, mean_lengths
from cluster.spec import PoolSpec, Role
from workers.config import EngineConfig
from workers.costs import CostModel
from workers.request import SLO

MAX_LENGTHENING = 8
MARGIN = 0.05  # a sample of a few hundred requests attains at most this much more than the whole load
MIN_CHUNK = 16  # prompt tokens beside decodes
FLOOR = 256.0  # no rate below the cap over this is simulated


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate with its load and SLO, and what closed forms say about it.

    `estimate`: expected requests/s; `max_rate`: an upper bound. `unloaded`: share of requests that meet the SLO on an
    idle machine; no load attains more. `weight`: the GPUs as the objective counts them. With `give_up`, a run ends once
    it is certain whether it attains this share. A run at a high rate has at most `lengthening` times `requests`.
    """

    layout: Layout
    case: Case
    load: PlanLoad
    slo: SLO
    requests: int
    gpus: int
    weight: float
    estimate: float
    max_rate: float
    unloaded: float
    give_up: float | None = None
    lengthening: int = MAX_LENGTHENING

    @property
    def name(self) -> str:
        return self.case.name

    def __call__(self, rate: float, seed: int) -> Attainment:
        run = self.run(rate, seed)
        return attainment(run, self.slo) if self.give_up is None else judged(run, self.slo, self.give_up)

    def count(self, rate: float) -> int:
        """Requests of a run at this rate."""
        _, output = mean_lengths(self.load.arrivals)
        span_s = probe_span_s(self.slo, output)
        return min(self.requests * self.lengthening, max(self.requests, ceil(rate * span_s)))

    def run(self, rate: float, seed: int) -> Run:
        """Simulate until the last request has ended or missed its deadline."""
        from cluster.offline.sim.run import RunOptions, simulate

        rate = max(rate, self.max_rate / FLOOR)  # below, requests hardly meet, and idle time is simulated, too
        workload = self.load.at(rate, seed, self.count(rate))
        arrivals = len(workload.arrivals)
        misses = None if self.give_up is None else most_missed(self.give_up, arrivals)
        met = None if self.give_up is None else ceil(self.give_up * arrivals)
        until_s = last_deadline_s(workload, self.slo)
        options = RunOptions(seed=seed, slo=self.slo, until_s=until_s, max_missed=misses, min_met=met, system=self.name)
        return simulate(self.case.spec, self.case.models, workload, options)


def full_trial(request: PlanRequest, layout: Layout) -> Trial:
    """The whole layout. Raises `DoesNotFit` and `ProfileError`, like the other two."""
    return _trial(request, case_of(request, layout), layout, request.load, request.slo)


def prefill_trial(request: PlanRequest, group: WorkerGroup) -> Trial:
    """A prefill instance alone, against the TTFT SLO."""
    load, slo = replace(request.load, one_token=True), replace(request.slo, tpot_s=None)
    return _trial(request, prefill_alone(request, group), _one(group), load, slo)


def decode_trial(request: PlanRequest, group: WorkerGroup) -> Trial:
    """A decode instance alone, against both SLOs.

    Blocks are reserved before the prompt is computed, so a full decode instance shows in TTFT, not in TPOT.
    """
    return _trial(request, decode_alone(request, group), _one(group), request.load, request.slo, phase=Role.DECODE)


def _one(group: WorkerGroup) -> Layout:
    return Layout("split", (replace(group, replicas=1),))


def _trial(
    request: PlanRequest, case: Case, layout: Layout, load: PlanLoad, slo: SLO, phase: Role | None = None
) -> Trial:
    """`phase`: the only role that limits the rate; otherwise every pool does."""
    weight = sum(group.gpus * request.weight(group.hardware) for group in layout.groups)
    arrivals = load.arrivals
    pools = [pool for pool in case.spec.pools if phase in (None, pool.role)]
    costs = {pool.name: case.models[pool.name].cost for pool in pools}
    capacities = [(pool, capacity(pool, costs[pool.name], arrivals, slo.tpot_s)) for pool in pools]
    return Trial(
        layout=layout,
        case=case,
        load=load,
        slo=slo,
        requests=request.requests,
        gpus=layout.gpus,
        weight=weight,
        estimate=min(
            each.usual * _busy_share(pool, costs[pool.name], arrivals, slo, request.target) for pool, each in capacities
        ),
        max_rate=min(each.most for _, each in capacities),
        unloaded=_unloaded(pools, costs, arrivals, slo),
    )


# ---- runs that end early -----------------------------------------------------------------------------------------


def last_deadline_s(workload: Workload, slo: SLO) -> float | None:
    """Seconds from the first arrival after which no request can still meet the SLO. None: never."""
    ttft_s, tpot_s = slo.ttft_s, slo.tpot_s
    if ttft_s is None or tpot_s is None:
        return None
    ends = (each.at_s + ttft_s + tpot_s * (each.output_tokens - 1) for each in workload.arrivals)
    return max(ends) - workload.arrivals[0].at_s + 1e-6


# ---- closed forms ------------------------------------------------------------------------------------------------


def prompt_steps(pool: PoolSpec, cost: CostModel, tokens: int) -> list[float]:
    """Seconds of the steps of one prompt, each at most the pool's chunk."""
    chunk = pool.engine.max_batch_tokens
    return [cost.prefill_seconds(min(chunk, tokens - done), done) for done in range(0, tokens, chunk)]


def prompt_latency(pool: PoolSpec, cost: CostModel, tokens: int) -> float:
    """Seconds of one prompt on an idle worker: the steps follow each other through the pipeline stages."""
    steps, stages = prompt_steps(pool, cost, tokens), pool.parallel.pipeline
    return (sum(steps) + (stages - 1) * max(steps)) / stages


def _busy_share(pool: PoolSpec, cost: CostModel, arrivals: Sequence[Arrival], slo: SLO, target: float) -> float:
    """How busy prompts may keep the pool while the slowest request of the target still meets its TTFT.

    The mean wait in M/D/1 is half a prompt's time over the idle share, and one in ten waits for about twice that.
    """
    if pool.role is Role.DECODE or slo.ttft_s is None:
        return 1.0
    unloaded = sorted(prompt_latency(pool, cost, each.prompt_tokens) for each in arrivals)
    slowest_s = unloaded[min(len(unloaded) - 1, int(target * len(unloaded)))]
    left_s = max(slo.ttft_s - slowest_s, 0.01 * slo.ttft_s)
    busy_s = sum(sum(prompt_steps(pool, cost, each.prompt_tokens)) for each in arrivals) / pool.parallel.pipeline
    return left_s / (left_s + busy_s / len(arrivals))


def _unloaded(
    pools: Sequence[PoolSpec], costs: Mapping[str, CostModel], arrivals: Sequence[Arrival], slo: SLO
) -> float:
    """A request that the KV cannot hold is not served at all."""
    ttft_slo_s, tpot_slo_s = slo.ttft_s or inf, slo.tpot_s or inf

    def met(pool: PoolSpec, each: Arrival) -> bool:
        cost = costs[pool.name]
        if not held_at_once(pool.engine, each.prompt_tokens + each.output_tokens):
            return False
        if pool.role is not Role.DECODE and prompt_latency(pool, cost, each.prompt_tokens) > ttft_slo_s:
            return False
        decodes = pool.role is not Role.PREFILL and each.output_tokens > 1
        return not decodes or cost.decode_seconds(1, each.prompt_tokens) <= tpot_slo_s

    return sum(all(met(pool, each) for pool in pools) for each in arrivals) / len(arrivals)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests/s of the mean request: what is likely, and what no order of steps exceeds."""

    usual: float
    most: float


def capacity(pool: PoolSpec, cost: CostModel, arrivals: Sequence[Arrival], tpot_s: float | None) -> Capacity:
    """Prompts in full steps, decodes in the largest batch that fits and meets the TPOT SLO.

    A mixed worker hides the shorter phase behind the longer one at best. Usually a step holds as many decodes for its
    prompt tokens as requests have output tokens for theirs.
    """
    engine = pool.engine
    prompt, output, context = _mean_tokens(arrivals)
    stages = pool.replicas * pool.parallel.pipeline
    prefill_s = decode_s = 0.0
    if pool.role is not Role.DECODE:
        together = max(1, engine.max_batch_tokens // prompt)
        prefill_s = (
            cost.mixed_seconds(((prompt, 0),) * together, 0, 0) / together
            if prompt <= engine.max_batch_tokens
            else sum(prompt_steps(pool, cost, prompt))
        )
    if pool.role is Role.PREFILL or output <= 1:
        bound = stages / max(prefill_s, 1e-9)
        return Capacity(bound, bound)
    max_batch = _max_concurrent(pool, context)
    batch, _ = decode_batch(pool, cost, arrivals, tpot_s)
    decode_s = output * cost.decode_seconds(batch, batch * context) / batch
    bound = stages / max(prefill_s, decode_s, 1e-9)
    if pool.role is Role.DECODE:
        return Capacity(bound, bound)
    usual = stages * _mixed_rate(cost, prompt, output, context, engine.max_batch_tokens, max_batch, tpot_s)
    return Capacity(min(usual, bound), bound)


def held_at_once(engine: EngineConfig, tokens: int) -> int:
    """Sequences of so many tokens that the KV blocks hold."""
    return engine.kv_blocks // -(-tokens // engine.block_size)


def _max_concurrent(pool: PoolSpec, context: int) -> int:
    """Decodes of one step; the sequences of a worker are spread over its stages."""
    engine = pool.engine
    room = min(engine.max_running, held_at_once(engine, context))
    return max(1, room // pool.parallel.pipeline)


def decode_batch(pool: PoolSpec, cost: CostModel, arrivals: Sequence[Arrival], tpot_s: float | None) -> tuple[int, int]:
    """The largest batch that fits and meets the TPOT SLO, and the mean context of its sequences."""
    _, _, context = _mean_tokens(arrivals)
    return _largest_batch(cost, _max_concurrent(pool, context), context, tpot_s), context


def _mean_tokens(arrivals: Sequence[Arrival]) -> tuple[int, float, int]:
    """Of a prompt, of an answer, and of a sequence's context while it decodes."""
    prompt, output = mean_lengths(arrivals)
    return round(prompt), output, round(prompt) + round(output / 2)


def _largest_batch(cost: CostModel, max_batch: int, context: int, tpot_s: float | None) -> int:
    if tpot_s is None:
        return max_batch
    fits, above = 1, max_batch + 1
    while above - fits > 1:
        middle = (fits + above) // 2
        within = cost.decode_seconds(middle, middle * context) <= tpot_s
        fits, above = (middle, above) if within else (fits, middle)
    return fits


def _mixed_rate(
    cost: CostModel, prompt: int, output: float, context: int, chunk: int, max_batch: int, tpot_s: float | None
) -> float:
    """Requests/s with the best of the chunk sizes whose steps meet TPOT; with the smallest one when none does."""
    best = rate = 0.0
    while chunk >= MIN_CHUNK:
        batch = max(1, min(max_batch, round(chunk * output / prompt)))
        whole = chunk // prompt
        prompts = ((prompt, 0),) * whole or ((chunk, prompt // 2),)
        step_s = cost.mixed_seconds(prompts, batch, batch * context)
        rate = min(whole or chunk / prompt, batch / output) / step_s
        if tpot_s is None or step_s <= tpot_s:
            best = max(best, rate)
        chunk //= 2
    return best or rate


@dataclass(frozen=True, slots=True)
class Option:
    """`serves`: its mean attainment at the requested rate, if there is one."""

    layout: Layout
    trial: Trial
    goodput: Goodput
    serves: Attainment | None = None

    @property
    def value(self) -> float:
        """Goodput per unit of weight."""
        return self.goodput.rate / self.trial.weight

    @property
    def headroom(self) -> str:
        """How many requests met each SLO at the highest rate that held, and which SLO breaks above it."""
        by_seed = dict(zip(self.goodput.seeds, self.goodput.by_seed, strict=True))
        held = [each for each in self.goodput.probes if each.rate == by_seed.get(each.seed)]
        if not held:
            return ""
        one = min(held, key=lambda each: each.attained.both)
        target = self.goodput.target
        breaks = f"; above, {' and '.join(self.goodput.limits)} breaks first" if self.goodput.limits else ""
        met = f"TTFT met by {one.attained.ttft:.1%} and TPOT by {one.attained.tpot:.1%}"
        return f"at {one.rate:.4g} requests/s {met} of requests, {target:.0%} needed{breaks}"

    def merit(self, request: PlanRequest) -> tuple[float, float]:
        """The higher, the better, by the request's objective; of equals the smaller."""
        if request.rate is not None:
            return -self.trial.weight, self.value
        return (self.goodput.rate if request.objective == "throughput" else self.value), -self.trial.weight


def rate_text(request: PlanRequest, trial: Trial, rate: float) -> str:
    """As the objective counts it."""
    if request.rate is not None or request.objective == "throughput":
        return f"{rate:.3g} requests/s on {trial.gpus} GPU{'s' if trial.gpus > 1 else ''}"
    return f"{rate / trial.weight:.3g} requests/s per {request.unit}"
