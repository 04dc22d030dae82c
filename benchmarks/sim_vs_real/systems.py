"""The two systems that are run, and the requests they get. Pure.

Lengths are those of a small chat load with a long prompt now and then: what a long prompt does to everybody else is
what the two systems differ in.
"""

import random
from dataclasses import replace

from benchmarks.hosted import ENGINE, MODEL, PATIENT, SHARE
from cluster.offline.sim.fleet import environment_of, measured_models
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from workers.profiles.measured import ClusterProfile
from workers.request import SLO

PROMPTS = (64, 64, 128, 128, 1024)
ANSWER = 48
PINNED = replace(ENGINE, cores="auto")
SPLIT = ClusterSpec(
    MODEL,
    (
        PoolSpec("prefill", Role.PREFILL, engine=PINNED, resources=SHARE),
        PoolSpec("decode", Role.DECODE, engine=replace(PINNED, kv_blocks=768), resources=SHARE),
    ),
    "split",
    gateway=GatewaySpec(grpc_port=0),
    health=PATIENT,
)
COLOCATED = replace(
    SPLIT,
    name="colocated",
    pools=(PoolSpec("mixed", Role.MIXED, engine=replace(PINNED, kv_blocks=768, threads=2), resources=SHARE),),
)
SYSTEMS = {spec.name: spec for spec in (SPLIT, COLOCATED)}


def workload(name: str, count: int, rate: float | None, seed: int, turn: int = 0) -> Workload:
    """Poisson arrivals at `rate` a second; None: all at once. Equal seeds ask for equal lengths at any rate.

    Each `turn` at one cluster has prompts of its own: what earlier ones left in its prefix caches is of no use.
    """
    lengths, times = random.Random(f"lengths {seed}"), random.Random(f"times {seed}")
    arrivals, at_s = [], 0.0
    for number in range(count):
        arrivals.append(Arrival(at_s, lengths.choice(PROMPTS), ANSWER, prefix=(turn * count + number,)))
        at_s += times.expovariate(rate) if rate is not None else 0.0
    return Workload(name, tuple(arrivals))


def capacity(profile: ClusterProfile, spec: ClusterSpec, count: int, seed: int) -> float:
    """Requests a second, in simulation, when all of them are there at once."""
    run = simulate(
        spec,
        measured_models(profile, spec),
        workload("all at once", count, None, seed),
        RunOptions(environment=environment_of(profile)),
    )
    return count / run.seconds


def promise(profile: ClusterProfile, spec: ClusterSpec) -> SLO:
    """Twice what the longest prompt takes alone, and twice a decode step of four: kept by most, not by all."""
    prefill, decode = spec.pools[0], spec.pools[-1]
    cost, budget = profile.cost(prefill.name), prefill.engine.max_batch_tokens
    firsts = range(0, max(PROMPTS), budget)
    alone_s = sum(cost.prefill_seconds(min(budget, max(PROMPTS) - first), first) for first in firsts)
    step_s = profile.cost(decode.name).decode_seconds(4, 4 * (sum(PROMPTS) // len(PROMPTS)))
    return SLO(ttft_s=round(2 * alone_s, 2), tpot_s=round(2 * step_s, 3))
