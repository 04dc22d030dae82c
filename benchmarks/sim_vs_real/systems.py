"""The compared systems and their requests. Pure.

`chat` is a small load with an occasional long prompt, because the systems differ in the effect of a long prompt on the
other requests. In `prefixes` the same prompts follow one of two system prompts, which caches hold. In `shift` the first
half of the requests are long prompts with short answers, the second half short prompts with long answers. In `samples`
each prompt gets several answers (`n`).
"""

import random
from dataclasses import replace

from benchmarks.hosted import ENGINE, MODEL, PATIENT, SHARE
from cluster.offline.sim.fleet import environment_of, measured_models
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, PoolSpec, Role
from workers.profiles.measured import ClusterProfile
from workers.request import SLO

PROMPTS = (64, 64, 128, 128, 1024)
ANSWER = 48
SYSTEM_PROMPTS, BLOCK = 2, 512  # shared ones, and their tokens
ANSWERS = 3  # to a prompt of `samples`
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
OURS = replace(
    COLOCATED,
    name="ours",
    pools=(
        PoolSpec(
            "mixed",
            Role.MIXED,
            replicas=2,
            engine=replace(PINNED, kv_blocks=576, batching="adaptive", prompt_order="deadline"),
            resources=SHARE,
        ),
    ),
    gateway=GatewaySpec(grpc_port=0, routing="slo", admission="slo", rebalance=True),
    elastic=ElasticSpec(mode="act"),
)
SYSTEMS = {spec.name: spec for spec in (SPLIT, COLOCATED, OURS)}
CHAT, PREFIXES, SHIFT, SAMPLES = KINDS = ("chat", "prefixes", "shift", "samples")


def workload(name: str, count: int, rate: float | None, seed: int, turn: int = 0, kind: str = CHAT) -> Workload:
    """Poisson arrivals with `rate` answers a second; None: all at once. A seed gives the same lengths at any rate.

    Each `turn` has its own prompts, so it does not hit the prefix caches of earlier ones.
    """
    lengths, times = random.Random(f"lengths {seed}"), random.Random(f"times {seed}")
    arrivals, at_s = [], 0.0
    first = turn * (count + SYSTEM_PROMPTS)  # block ids of this turn
    answers = ANSWERS if kind == SAMPLES else 1
    for number in range(0, count, answers):
        prefix: tuple[int, ...] = (first + number,)
        prompt, answer = lengths.choice(PROMPTS), ANSWER
        if kind == PREFIXES:
            prompt, prefix = prompt + BLOCK, (first + count + lengths.randrange(SYSTEM_PROMPTS), *prefix)
        elif kind == SHIFT:
            prompt, answer = (max(PROMPTS), ANSWER // 4) if number < count // 2 else (min(PROMPTS), 2 * ANSWER)
        arrivals += [Arrival(at_s, prompt, answer, prefix=prefix, sample=sample) for sample in range(answers)]
        at_s += times.expovariate(rate / answers) if rate is not None else 0.0
    return Workload(name, tuple(arrivals), BLOCK)


def capacity(profile: ClusterProfile, spec: ClusterSpec, count: int, seed: int, kind: str = CHAT) -> float:
    """Simulated answers per second when all requests arrive at once."""
    run = simulate(
        spec,
        measured_models(profile, spec),
        workload("all at once", count, None, seed, kind=kind),
        RunOptions(environment=environment_of(profile)),
    )
    return len(run.served) / run.seconds


def slo_for(profile: ClusterProfile, spec: ClusterSpec) -> SLO:
    """Twice the time of the longest prompt alone, and twice a decode step of four: most requests attain it."""
    prefill, decode = spec.pools[0], spec.pools[-1]
    cost, budget = profile.cost(prefill.name), prefill.engine.max_batch_tokens
    firsts = range(0, max(PROMPTS), budget)
    alone_s = sum(cost.prefill_seconds(min(budget, max(PROMPTS) - first), first) for first in firsts)
    step_s = profile.cost(decode.name).decode_seconds(4, 4 * (sum(PROMPTS) // len(PROMPTS)))
    return SLO(ttft_s=round(2 * alone_s, 2), tpot_s=round(2 * step_s, 3))
