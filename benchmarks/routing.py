"""CPU time of one routing decision in a large cluster, when the statistics of no worker or of one in ten are new.

CPU time, because a decision never waits, and because other processes then count less.
"""

import gc
import random
import time
from collections.abc import Iterator

from msgspec import structs

from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from cluster.policy.policy import open_policy
from cluster.policy.routing.prefix_index import HASH_BLOCK_SIZE, prefix_hashes
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.view import ClusterView, WorkerState, WorkerView
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.kv_events import HashChanges, KVEvents
from workers.request import SLO, Request, SamplingParams

ROUNDS = 5
WORKERS, QUICK_WORKERS = (512, 1000), (64,)
DECISIONS = 200  # in a round
ROUTERS = ("least-loaded", "slo")
FRESH = {"no statistics are new": 0.0, "one worker in ten has new ones": 0.1}
BLOCKS, BLOCK_SIZE = 4000, 16
HASHES = 1000  # in each worker's cache
DOCUMENTS = 40  # prompts begin with one of these
BUSY = 200  # requests under way
COST = LinearCost(0.012, 0.0002, 1e-8, 0.0001, 1e-7, 0.001, 1e-9, 0.0)
TABLE = "CPU time of one routing decision"


class _Town:
    """A cluster that changes at random, and the policy of one gateway. The same seed gives the same decisions."""

    def __init__(self, router: str, num_workers: int, fresh: float) -> None:
        self._draw = draw = random.Random(0)
        engine = EngineConfig(block_size=BLOCK_SIZE, kv_blocks=BLOCKS, max_batch_tokens=2048, max_running=256)
        pools = tuple(PoolSpec(role.value, role, engine=engine, cost=COST) for role in (Role.PREFILL, Role.DECODE))
        gateway = GatewaySpec(routing=router, slo=SLO(2.0, 0.05))
        self._policy = open_policy(ClusterSpec(model="m", pools=pools, gateway=gateway), 0)
        self._num_fresh = int(num_workers * fresh)
        self._documents = [self._tokens(draw.choice((100, 700, 1500, 4000))) for _ in range(DOCUMENTS)]
        self._workers = [self._changed(self._worker(number)) for number in range(num_workers)]
        for worker in self._workers:
            hashes = [draw.getrandbits(60) for _ in range(HASHES)]
            for document in draw.sample(self._documents, 8):
                hashes += prefix_hashes(document, HASH_BLOCK_SIZE)
            events = KVEvents(0, 1, 1, HASH_BLOCK_SIZE, whole=True, device=HashChanges(tuple(hashes)))
            self._policy.index.take(worker.name, worker.incarnation, events)
        self._now_s = 1000.0
        self._number = 0
        self._under_way: list[Request] = []

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(50_000) for _ in range(count))

    def _worker(self, number: int) -> WorkerView:
        role = Role.DECODE if number % 2 else Role.PREFILL
        capacity = BLOCKS * BLOCK_SIZE
        return WorkerView(f"w{number}", role.value, role, WorkerState.READY, "1", capacity_tokens=capacity)

    def _changed(self, known: WorkerView) -> WorkerView:
        """With other statistics."""
        draw = self._draw
        running = 0 if known.role is Role.PREFILL else draw.choice((0, 1, 3, 8, 20))
        stats = structs.replace(
            known.stats,
            running=running,
            queued_tokens=running + draw.choice((0, 0, 0, 500, 3000)),
            total_blocks=BLOCKS,
            free_blocks=BLOCKS - running * draw.randrange(5, 60),
            step_s=draw.choice((0.012, 0.013, 0.014)),
        )
        return structs.replace(known, stats=stats)

    def decisions(self, count: int) -> Iterator[float]:
        """Seconds of each."""
        draw, policy = self._draw, self._policy
        for _ in range(count):
            self._now_s += draw.expovariate(40.0)
            self._number += 1
            for place in draw.sample(range(len(self._workers)), self._num_fresh):
                self._workers[place] = self._changed(self._workers[place])
            prompt = draw.choice(self._documents) + self._tokens(draw.choice((0, 100, 900)))
            sampling = SamplingParams(seed=1, max_tokens=draw.choice((1, 50, 400)))
            request = Request(f"r{self._number}", prompt, sampling, SLO())
            query = PlacementQuery(ClusterView(1, "c", None, tuple(self._workers)), request, now_s=self._now_s)
            begun_s = time.thread_time()
            placement = policy.choose(query)
            yield time.thread_time() - begun_s
            assert isinstance(placement, Placement), "every worker is ready"
            policy.began(query, placement)
            self._under_way.append(request)
            if len(self._under_way) > BUSY:
                key = self._under_way.pop(draw.randrange(BUSY // 2)).key
                policy.prefilled(key, self._now_s, 0.1)
                policy.ended(key, self._now_s, 20)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    figures: list[Figure] = []
    for num_workers in QUICK_WORKERS if quick else WORKERS:
        towns = {(router, when): _Town(router, num_workers, FRESH[when]) for router in ROUTERS for when in FRESH}
        seconds: dict[tuple[str, str], list[list[float]]] = {key: [] for key in towns}
        for number in range(rounds + 1):
            for key, town in towns.items():
                found = sorted(town.decisions(DECISIONS))
                if number:  # the first round fills the tables
                    seconds[key].append(found)
            gc.freeze()  # as the process of a gateway does
        for (router, when), found_s in seconds.items():
            row = f"{num_workers:,} workers, {when}"
            for percent in (50, 99):
                values = spread(each[len(each) * percent // 100] for each in found_s)
                figures.append(Figure(TABLE, row, f"{router}, p{percent}", "us", values))
        progress(f"{num_workers:,} workers")
    return BenchmarkPart("routing", tuple(figures))
