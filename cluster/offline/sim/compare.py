"""Several systems under the same load: one run each, or the goodput of each, on as many processes as are wanted."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from cluster.offline.scoring.figures import Attainment, attainment
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, goodput, probe_span_s
from cluster.offline.scoring.records import Run
from cluster.offline.sim.cluster import ALONE, PoolModel, Surroundings
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.changes import resampled
from cluster.spec import ClusterSpec, PoolSpec, Role
from workers.costs import CostModel
from workers.request import SLO

MOST_REQUESTS = 20_000  # of one probe
CUT_AFTER = 30.0  # a goodput run ends so many promises after its last arrival: who waits longer has missed his


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster to simulate. `models` by pool name."""

    name: str
    spec: ClusterSpec
    models: Mapping[str, PoolModel]

    @property
    def gpus(self) -> int:
        return sum(pool.num_ranks for pool in self.spec.pools)


@contextmanager
def processes(count: int) -> Iterator[Map]:
    """A `map` over so many processes; one: this one."""
    if count <= 1:
        yield map
        return
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        yield pool.map


def run_case(case: Case, workload: Workload, options: RunOptions) -> Run:
    """See `simulate`."""
    return simulate(case.spec, case.models, workload, replace(options, system=case.name))


def run_all(cases: Sequence[Case], workload: Workload, seeds: Sequence[RunOptions], each: Map) -> Iterable[Run]:
    """Every case with every seed, case by case."""
    jobs = [(case, options) for case in cases for options in seeds]
    return each(partial(_run_job, workload), [case for case, _ in jobs], [options for _, options in jobs])


def run_at(
    case: Case, source: Workload, rates: Sequence[float], count: int, options: RunOptions, each: Map
) -> Iterable[Run]:
    """A case at several rates: the same `count` requests drawn from the source, Poisson arrivals."""
    drawn = [resampled(source, count, rate, options.seed) for rate in rates]
    return each(partial(run_case, case, options=replace(options, trace=False)), drawn)


def _run_job(workload: Workload, case: Case, options: RunOptions) -> Run:
    return run_case(case, workload, options)


@dataclass(frozen=True, slots=True)
class Attain:
    """Attainment of a case at a rate: requests with lengths drawn from the source's, Poisson arrivals.

    There are `count` of them, or as many as come in `span_s`: a queue that grows needs time to break a promise.
    """

    case: Case
    source: Workload
    count: int
    slo: SLO
    around: Surroundings = ALONE

    @property
    def span_s(self) -> float:
        arrivals = self.source.arrivals
        return probe_span_s(self.slo, sum(each.output_tokens for each in arrivals) / len(arrivals))

    def __call__(self, rate: float, seed: int) -> Attainment:
        count = max(self.count, min(MOST_REQUESTS, math.ceil(rate * self.span_s)))
        workload = resampled(self.source, count, rate, seed)
        last = max(self.source.arrivals, key=lambda each: each.output_tokens).output_tokens
        promised_s = (self.slo.ttft_s or 0.0) + last * (self.slo.tpot_s or 0.0)
        until_s = workload.duration_s + CUT_AFTER * promised_s if promised_s else None
        options = RunOptions(seed=seed, slo=self.slo, until_s=until_s, around=self.around)
        return attainment(run_case(self.case, workload, options), self.slo)


@dataclass(frozen=True, slots=True)
class Question:
    """What goodput is asked for. `count`: the fewest requests of a probe."""

    source: Workload
    slo: SLO
    targets: tuple[float, ...] = (0.9, 0.99)
    seeds: tuple[int, ...] = (0, 1, 2)
    count: int = 300
    tolerance: float = 0.03
    around: Surroundings = ALONE


def goodputs(case: Case, question: Question, start: float, each: Map) -> tuple[Goodput, ...]:
    """For each target, by one search that keeps what it has seen. `start`: requests a second to begin at."""
    probes = Probes(Attain(case, question.source, question.count, question.slo, question.around), each)
    search = Search(start, floor=start / 4096, cap=start * 4096, tolerance=question.tolerance)
    return tuple(
        goodput(probes, search, question.slo, target=target, seeds=question.seeds, gpus=case.gpus)
        for target in question.targets
    )


def capacity(case: Case, source: Workload) -> float:
    """Requests a second that the case could serve were it always busy: where a search may begin.

    Each pool's share of the work is known from costs alone: prompts at their length, decodes in full batches. Pools of
    one role add up.
    """
    count = len(source.arrivals)
    prompt = sum(each.prompt_tokens for each in source.arrivals) / count
    output = sum(each.output_tokens for each in source.arrivals) / count
    rates = {role: 0.0 for role in Role}
    for pool in case.spec.pools:
        rates[pool.role] += _pool_rate(pool, case.models[pool.name].cost, prompt, output)
    return rates[Role.MIXED] + min(rates[Role.PREFILL], rates[Role.DECODE])


def _pool_rate(pool: PoolSpec, cost: CostModel, prompt: float, output: float) -> float:
    context = round(prompt + output / 2)
    batch = max(1, min(pool.engine.max_running, pool.engine.kv_blocks * pool.engine.block_size // max(1, context)))
    prefill_s = cost.prefill_seconds(round(prompt)) if pool.role is not Role.DECODE else 0.0
    decode_s = output * cost.decode_seconds(batch, batch * context) / batch if pool.role is not Role.PREFILL else 0.0
    seconds = prefill_s + decode_s
    return pool.replicas / seconds if seconds else float("inf")
