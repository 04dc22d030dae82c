"""Several systems under the same load: one run of each, or the goodput of each, on one or more processes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from cluster.offline.process_pool import ProcessPool
from cluster.offline.scoring.figures import Attainment, judged, most_missed
from cluster.offline.scoring.goodput import Goodput, Map, Probes, Search, goodput, probe_span_s
from cluster.offline.scoring.records import Run
from cluster.offline.sim.case import Case as Case
from cluster.offline.sim.cluster import DEFAULT_ENVIRONMENT, Environment
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.sim.systems import phase_seconds
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.changes import resampled
from cluster.spec import Role
from workers.request import SLO

MAX_REQUESTS = 20_000  # of one probe
CUT_AFTER = 30.0  # a probe ends this many SLOs after its last arrival; requests that still wait have missed them


@contextmanager
def processes(count: int) -> Iterator[Map]:
    """A `map` over this many processes; with one, in this process."""
    if count <= 1:
        yield map
        return
    with ProcessPool(count) as pool:
        yield pool.map


def run_case(case: Case, workload: Workload, options: RunOptions) -> Run:
    """See `simulate`."""
    return simulate(case.spec, case.models, workload, replace(options, system=case.name))


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """How to search goodput. `requests`: the fewest of a probe; more if probes must last longer."""

    source: Workload
    slo: SLO
    targets: tuple[float, ...]
    seeds: tuple[int, ...]
    requests: int
    tolerance: float = 0.03
    environment: Environment = DEFAULT_ENVIRONMENT


def goodputs(case: Case, options: GoodputOptions, each: Map) -> tuple[Goodput, ...]:
    """One for each target; the searches share their probes."""
    probes = Probes(partial(_probe, case, options), each)
    start = capacity(case, options.source) / 4
    search = Search(start, floor=start / 4096, cap=start * 4096, tolerance=options.tolerance)
    return tuple(
        goodput(probes, search, options.slo, target=target, seeds=options.seeds, gpus=case.gpus)
        for target in options.targets
    )


def _probe(case: Case, options: GoodputOptions, rate: float, seed: int) -> Attainment:
    """Poisson arrivals at this rate, with lengths drawn from the source; until it misses all targets for certain."""
    slo, outputs = options.slo, [each.output_tokens for each in options.source.arrivals]
    span_s = probe_span_s(slo, sum(outputs) / len(outputs))
    count = max(options.requests, min(MAX_REQUESTS, math.ceil(rate * span_s)))
    workload = resampled(options.source, count, rate, seed)
    slo_s = (slo.ttft_s or 0.0) + max(outputs) * (slo.tpot_s or 0.0)
    until_s = workload.duration_s + CUT_AFTER * slo_s if slo_s else None
    least = min(options.targets)
    missed = most_missed(least, len(workload.arrivals))
    run_options = RunOptions(seed, slo, until_s=until_s, max_missed=missed, environment=options.environment)
    return judged(run_case(case, workload, run_options), slo, least)


def capacity(case: Case, source: Workload) -> float:
    """Requests/s in closed form if the cluster were always busy: where a search may begin. Pools of a role add up."""
    rates = {role: 0.0 for role in Role}
    for pool in case.spec.pools:
        prefill_s, decode_s = phase_seconds(case.models[pool.name].cost, source, pool.engine)
        seconds = {Role.PREFILL: prefill_s, Role.DECODE: decode_s, Role.MIXED: prefill_s + decode_s}[pool.role]
        rates[pool.role] += pool.replicas / seconds if seconds else math.inf
    return rates[Role.MIXED] + min(rates[Role.PREFILL], rates[Role.DECODE])
