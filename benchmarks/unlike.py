"""Two kinds of GPU in one cluster, in virtual time: who should prefill, what roles make of it, and what a dollar buys.

python -m benchmarks.unlike [SEED...]

H100s compute prompts twice as fast as A100s and decode 1.4 times as fast, at 2.15 times the price.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.elastic.streams import Stream, superposed
from cluster.offline.scoring.figures import attainment
from cluster.offline.scoring.records import Run
from cluster.offline.sim.fleet import fleet, models_of
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.lengths import LengthMix, Lengths, Uniform
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import ParallelConfig
from workers.profiles.hardware import hardware_of
from workers.request import SLO

MODEL, H100, A100 = "llama-2-70b", "h100-80gb", "a100-80gb"
PROMISE = SLO(ttft_s=4.0, tpot_s=0.075)
SECONDS, SEEDS = 40.0, (0, 1)
BATCH = 2048
FIXED = ElasticSpec()
ELASTIC = ElasticSpec(mode="act", window_s=15.0, margin=0.05, dwell_s=1.0, cooldown_s=2.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests a second, Poisson, of these lengths."""

    name: str
    lengths: Lengths
    rate: float


PROMPTS = Load("long prompts", LengthMix(((Uniform(1500, 4000), Uniform(20, 120)),)), 8.0)
ANSWERS = Load("long answers", LengthMix(((Uniform(100, 600), Uniform(200, 600)),)), 12.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """Workers of one GPU, there for one role."""

    hardware: str
    workers: int
    role: Role
    tensor: int = 4
    block_size: int = 16

    @property
    def dollars_an_hour(self) -> float:
        price = hardware_of(self.hardware).price_per_hour
        assert price is not None, "the data sheet has one"
        return price * self.workers * self.tensor

    def pool(self, number: int) -> PoolSpec:
        parallel = ParallelConfig(self.tensor)
        engine = fleet(MODEL, self.hardware, parallel, self.workers).engine
        blocks = engine.kv_blocks * engine.block_size // self.block_size
        engine = replace(
            engine, kv_blocks=blocks, block_size=self.block_size, batching="adaptive", max_batch_tokens=BATCH
        )
        name = f"{self.hardware.partition('-')[0]}-{number}"
        return PoolSpec(name, self.role, self.workers, parallel=parallel, engine=engine, hardware=self.hardware)


PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
ARRANGED: Mapping[str, tuple[Kind, ...]] = {
    "H100s prefill, A100s decode": (Kind(H100, 2, PREFILL), Kind(A100, 2, DECODE)),
    "A100s prefill, H100s decode": (Kind(H100, 2, DECODE), Kind(A100, 2, PREFILL)),
    "all do both": (Kind(H100, 2, MIXED), Kind(A100, 2, MIXED)),
}
PRICED: Mapping[str, tuple[Kind, ...]] = {
    "2 H100 + 2 A100": ARRANGED["H100s prefill, A100s decode"],
    "2 H100 + 1 A100 of TP 8, blocks of 32": (Kind(H100, 2, PREFILL), Kind(A100, 1, DECODE, 8, 32)),
    "3 H100": (Kind(H100, 1, PREFILL), Kind(H100, 2, DECODE)),
    "6 A100": (Kind(A100, 2, PREFILL), Kind(A100, 4, DECODE)),
}


@dataclass(frozen=True, slots=True)
class Told:
    """Shares of all requests that kept both promises; of prompt tokens and of answers' tokens, what H100s computed."""

    kept: float
    prompts: float
    answers: float
    kept_a_dollar: float


def cluster_of(kinds: Sequence[Kind], elastic: ElasticSpec) -> ClusterSpec:
    return ClusterSpec(
        MODEL,
        tuple(kind.pool(number) for number, kind in enumerate(kinds)),
        gateway=GatewaySpec(routing="slo", slo=PROMISE),
        health=HealthSpec(heartbeat_s=1.0, dead_after_s=10.0),
        executor="modelled",
        elastic=elastic,
    )


def run(kinds: Sequence[Kind], elastic: ElasticSpec, load: Load, seed: int, seconds: float = SECONDS) -> Run:
    """Until the last promise is due or kept."""
    spec = cluster_of(kinds, elastic)
    workload = superposed(load.name, [Stream(load.name, load.lengths, ((seconds, load.rate),))], 1.0, seed)
    longest = max(each.output_tokens for each in workload.arrivals)
    assert PROMISE.ttft_s is not None and PROMISE.tpot_s is not None
    until_s = workload.duration_s + PROMISE.ttft_s + longest * PROMISE.tpot_s
    return simulate(spec, models_of(spec), workload, RunOptions(seed, PROMISE, until_s=until_s))


def told(kinds: Sequence[Kind], found: Run) -> Told:
    """`kept_a_dollar`: requests, while the load lasts."""
    prompts = sum(each.prompt_tokens for each in found.workers)
    answers = sum(each.output_tokens for each in found.workers)
    fast = [each for each in found.workers if each.pool.startswith("h100")]
    kept = attainment(found, PROMISE).both
    span_s = found.served[-1].arrival_s - found.served[0].arrival_s
    dollars = sum(kind.dollars_an_hour for kind in kinds) * span_s / 3600.0
    return Told(
        kept=kept,
        prompts=sum(each.prompt_tokens for each in fast) / max(1, prompts),
        answers=sum(each.output_tokens for each in fast) / max(1, answers),
        kept_a_dollar=kept * len(found.served) / dollars,
    )


def mean(kinds: Sequence[Kind], elastic: ElasticSpec, load: Load, seeds: Sequence[int]) -> Told:
    every = [told(kinds, run(kinds, elastic, load, seed)) for seed in seeds]
    return Told(*(fmean(getattr(each, name) for each in every) for name in Told.__slots__))


def tables(seeds: Sequence[int]) -> Iterator[str]:
    """Two tables in Markdown, row by row."""
    loads = PROMPTS, ANSWERS
    title = " | ".join(f"{load.name}, {load.rate:g} a second: fixed | elastic" for load in loads)
    yield f"| at first | {title} |\n|---|{'---|' * 4}"
    for name, kinds in ARRANGED.items():
        every = [mean(kinds, elastic, load, seeds) for load in loads for elastic in (FIXED, ELASTIC)]
        yield f"| {name} | " + " | ".join(f"{e.kept:.0%} ({e.prompts:.0%}, {e.answers:.0%})" for e in every) + " |"
    title = " | ".join(f"{load.name}: kept | kept a dollar" for load in loads)
    yield f"\n| elastic | $ an hour | {title} |\n|---|---|{'---|' * 4}"
    for name, kinds in PRICED.items():
        every = [mean(kinds, ELASTIC, load, seeds) for load in loads]
        price = sum(kind.dollars_an_hour for kind in kinds)
        yield f"| {name} | {price:.1f} | " + " | ".join(f"{e.kept:.0%} | {e.kept_a_dollar:.0f}" for e in every) + " |"


def main() -> None:
    logging.disable(logging.WARNING)  # what is late is what is counted
    for row in tables([int(each) for each in sys.argv[1:]] or SEEDS):
        print(row, flush=True)


if __name__ == "__main__":
    main()
