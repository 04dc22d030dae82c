"""What each tier of the prefix cache is worth on Mooncake's conversation trace, in the simulator.

    python -m benchmarks.tier_goodput

First one worker, requests one after another: the share of prompt tokens found, beside one LRU list of as many blocks.
Then a fleet of Llama-3-8B on one H100 each, at several speeds of the trace. Takes ten minutes of CPU time.
"""

import math
from collections import Counter
from dataclasses import replace
from statistics import quantiles

from benchmarks.elastic.scenarios import MOONCAKE, TraceNotFound, shared
from benchmarks.host_cache import lru_hits
from cluster.offline.scoring.records import Run
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.fleet import fleet, pool_model
from cluster.offline.sim.run import simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.offline.workload.changes import faster
from cluster.offline.workload.load import load_workload
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import ByteSize, CacheConfig, DiskCacheConfig, ParallelConfig

MODEL, GPU, BLOCK = "llama-3-8b", "h100-80gb", 512
WORKERS = 3
HOST, DISK, SPEED = ByteSize(256 << 30), ByteSize(4 << 40), ByteSize(7_000_000_000)
ENDLESS = ByteSize(10**15)  # bytes per second: reading takes no time
TTFT_S = 5.0
FACTORS = (1.0,)  # times as fast as the trace
REQUESTS = 2000  # the first ones of the trace
SIZES = (500, 2000)  # blocks of one worker
SOURCES = ("device", "fetched", "host", "disk")

TIERS = {
    "device": CacheConfig(),
    "device, host": CacheConfig(HOST),
    "device, host, disk": CacheConfig(HOST, DiskCacheConfig("/kv", DISK, SPEED)),
}


def cluster_of(cache: CacheConfig, workers: int, kv_blocks: int = 0) -> tuple[ClusterSpec, dict[str, PoolModel]]:
    """Mixed workers. `kv_blocks` 0: what the GPU has room for."""
    parallel = ParallelConfig()
    engine = fleet(MODEL, GPU, parallel, workers).engine
    blocks = kv_blocks or engine.kv_blocks * engine.block_size // BLOCK
    engine = replace(engine, block_size=BLOCK, kv_blocks=blocks)
    pool = PoolSpec("mixed", Role.MIXED, workers, engine=engine, cache=cache, hardware=GPU)
    gateway = GatewaySpec(routing="slo", max_requests=1 << 20, placement_timeout_s=3600.0)
    spec = ClusterSpec(MODEL, (pool,), gateway=gateway, health=HealthSpec(1.0, 10.0), executor="simulated")
    return spec, {"mixed": pool_model(MODEL, GPU, parallel)}


def one_after_another(trace: Workload) -> Workload:
    """The same requests, far apart and with answers of one token."""
    arrivals = (
        Arrival(60.0 * number, each.prompt_tokens, 1, each.prefix) for number, each in enumerate(trace.arrivals)
    )
    return replace(trace, arrivals=tuple(arrivals))


def found_share(run: Run) -> float:
    return sum(each.cached_tokens for each in run.served) / sum(each.prompt_tokens for each in run.served)


def one_worker(workload: Workload, tier: str, num_blocks: int) -> float:
    """The share found with this many blocks in one tier, and little before it."""
    model = cluster_of(CacheConfig(), 1)[1]["mixed"]
    few, many = (ByteSize(blocks * BLOCK * model.kv_token_bytes) for blocks in (512, num_blocks))
    caches = {
        "device": CacheConfig(),
        "host": CacheConfig(many),
        "disk": CacheConfig(few, DiskCacheConfig("/kv", many, ENDLESS)),
    }
    spec, models = cluster_of(caches[tier], 1, num_blocks if tier == "device" else 300)
    return found_share(simulate(spec, models, workload))


def at_speed(trace: Workload, cache: CacheConfig, factor: float) -> Run:
    spec, models = cluster_of(cache, WORKERS)
    return simulate(spec, models, faster(trace, factor))


def shown(run: Run, seconds: float) -> str:
    """`seconds` in which the requests arrive."""
    found: Counter[str] = Counter()
    for worker in run.workers:
        for source in worker.sources:
            found[source.name] += source.hit_tokens
    sought = sum(each.prompt_tokens for each in run.served)
    shares = "  ".join(f"{found[name] / sought:>7.1%}" for name in SOURCES)
    ttft_s = [math.inf if each.ttft_s is None else each.ttft_s for each in run.served]
    p50, p90 = (quantiles(ttft_s, n=10)[place] for place in (4, 8))
    return f"{shares}  {p50:>8.2f}  {p90:>8.2f}  {sum(each <= TTFT_S for each in ttft_s) / seconds:>8.2f}"


def one_worker_table(workload: Workload) -> None:
    print(f"one worker, the first {REQUESTS:,} requests one after another, share of prompt tokens found")
    print(f"blocks of {BLOCK}   one LRU list     device       host       disk")
    for size in SIZES:
        shares = [lru_hits(workload, size), *(one_worker(workload, tier, size) for tier in ("device", "host", "disk"))]
        print(f"{size:>13,}  {'   '.join(f'{share:>8.1%}' for share in shares)}", flush=True)


def fleet_table(trace: Workload) -> None:
    print(f"\n{WORKERS} workers: found, TTFT p50 and p90 in s, requests/s with a TTFT of at most {TTFT_S:.0f} s")
    columns = "  ".join([*(f"{name:>7}" for name in SOURCES), *(f"{name:>8}" for name in ("p50", "p90", "goodput"))])
    print(f"{'requests/s':<12}{'tiers':<20}{columns}")
    for factor in FACTORS:
        for name, cache in TIERS.items():
            run = at_speed(trace, cache, factor)
            print(f"{factor * trace.rate:<12.2f}{name:<20}{shown(run, trace.duration_s / factor)}", flush=True)


def main() -> None:
    try:
        path = shared(MOONCAKE)
    except TraceNotFound as error:
        raise SystemExit(str(error)) from None
    one_worker_table(one_after_another(load_workload(f"{path}:first={REQUESTS},jitter=off")))
    fleet_table(load_workload(f"{path}:first={REQUESTS}"))


if __name__ == "__main__":
    main()
