"""How wrong a gateway is about caches, by how often it asks for news of them: in virtual time, on modelled workers.

python -m benchmarks.staleness [WORKLOAD]
"""

import asyncio
import random
import sys
from dataclasses import replace
from statistics import fmean

from cluster.events import Completed
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import PoolModel, open_cluster
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.systems import arrange
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.load import load_workload
from cluster.offline.workload.prompts import request
from cluster.policy.routing.prefix_index import Guesses
from cluster.spec import ClusterSpec
from workers.config import ParallelConfig

PAUSES_S = (0.05, 0.25, 1.0, 5.0, 30.0)
GATEWAYS = 4  # each knows of the others' prompts only what workers say
MODEL, HARDWARE, PARALLEL, WORKERS = "llama-3-70b", "a800", ParallelConfig(tensor=8), 8
BLOCK = 128
SHARES = (1.0, 0.03)
ANSWER = 4  # tokens: prompts are what is looked at


def conversations(users: int, turns: int, think_s: float) -> Workload:
    """Users of a few documents come back, after a while, with all that was said before."""
    draw = random.Random("conversations")
    rows = []
    for user in range(users):
        at_s = draw.uniform(0.0, think_s)
        document = draw.randrange(6)
        names = [document * 100 + number for number in range(8 + document)]
        for _ in range(turns):
            names += [(user + 1) * 10_000 + len(names) + number for number in range(draw.randint(2, 10))]
            rows.append(Arrival(at_s, len(names) * BLOCK, ANSWER, tuple(names)))
            at_s += draw.expovariate(1.0 / think_s)
    return Workload("conversations", tuple(sorted(rows, key=lambda row: row.at_s)), BLOCK)


def measure(workload: Workload, pause_s: float, share_of_memory: float) -> tuple[Guesses, float, float]:
    """What the gateways guessed, all together; the mean time to first token, and the part of prompts that was cached.

    `share_of_memory` of what the machines have is the KV pool: the smaller, the more is evicted.
    """
    made = fleet(MODEL, HARDWARE, PARALLEL, WORKERS)
    blocks = int(made.engine.kv_blocks * made.engine.block_size * share_of_memory) // BLOCK
    made = replace(made, engine=replace(made.engine, block_size=BLOCK, kv_blocks=blocks, max_batch_tokens=8192))
    spec = arrange("mooncake", made, WORKERS // 2)
    gateway = replace(
        spec.gateway, routing="mooncake-local", cache_news_s=pause_s, replicas=GATEWAYS, placement_timeout_s=3600.0
    )
    model = pool_model(MODEL, HARDWARE, PARALLEL)
    return run(_follow(replace(spec, gateway=gateway), {"prefill": model, "decode": model}, workload))


async def _follow(spec: ClusterSpec, models: dict[str, PoolModel], workload: Workload) -> tuple[Guesses, float, float]:
    clock = asyncio.get_running_loop()
    async with open_cluster(spec, models) as cluster:
        begin_s = clock.time() - workload.arrivals[0].at_s
        first_s: list[float] = []
        cached: list[tuple[int, int]] = []

        async def one(index: int) -> None:
            arrival = workload.arrivals[index]
            await asyncio.sleep(begin_s + arrival.at_s - clock.time())
            dispatcher = cluster.dispatchers[index % len(cluster.dispatchers)]
            asked = request(workload, index, models["prefill"].vocab_size)
            completed = [event async for event in dispatcher.generate(asked)][-1]
            assert isinstance(completed, Completed)
            first_s.append(completed.ledger.ttft_ns / 1e9)
            cached.append((completed.cached_tokens, asked.num_tokens))

        await asyncio.gather(*(one(index) for index in range(len(workload.arrivals))))
        guesses = [dispatcher.guesses for dispatcher in cluster.dispatchers]
    total = Guesses(*(sum(getattr(each, name) for each in guesses) for name in Guesses.__slots__))
    return total, fmean(first_s), sum(found for found, _ in cached) / sum(asked for _, asked in cached)


def main() -> None:
    workload, shares = conversations(96, 6, 10.0), list(SHARES)
    if len(sys.argv) > 1:
        shares = shares[:1]  # a trace's longest prompts need it
        trace = load_workload(sys.argv[1], seed=0)
        workload = trace.noted([replace(each, output_tokens=ANSWER) for each in trace.arrivals], "short answers")
    print(f"{workload.name}: {len(workload.arrivals)} requests, {GATEWAYS} gateways, {WORKERS} workers")
    print(f"{'KV pool':>8}{'asked every':>12}{'wrong':>9}{'absent':>9}{'unknown':>9}{'cached':>9}{'TTFT s':>8}")
    for share in shares:
        for pause_s in PAUSES_S:
            guesses, ttft_s, cached = measure(workload, pause_s, share)
            believed = max(1, guesses.tokens)
            parts = guesses.wrong / guesses.prompts, guesses.absent_tokens / believed, guesses.unknown_tokens / believed
            row = "".join(f"{part:>9.1%}" for part in (*parts, cached))
            print(f"{share:>8.0%}{pause_s:>10.2f} s{row}{ttft_s:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
