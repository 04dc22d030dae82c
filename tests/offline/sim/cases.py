"""Small clusters to simulate, for tests."""

from dataclasses import replace

from cluster.offline.sim.cluster import PoolModel
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import ByteSize, CacheConfig, DiskCacheConfig, EngineConfig
from workers.costs import LinearCost

COST = LinearCost(0.010, 0.0001, 0.0, 0.0005, 1e-7, 0.001, 1e-10)
BLOCK_BYTES = 16 * 46_080
ENGINE = EngineConfig(kv_blocks=600, max_batch_tokens=512, max_running=32)
HEALTH = HealthSpec(heartbeat_s=1.0, dead_after_s=10.0)


def split(prefills: int = 1, decodes: int = 1, *, engine: EngineConfig = ENGINE, gateways: int = 1) -> ClusterSpec:
    pools = (
        PoolSpec("prefill", Role.PREFILL, prefills, engine=engine),
        PoolSpec("decode", Role.DECODE, decodes, engine=engine),
    )
    return ClusterSpec("a-model", pools, gateway=GatewaySpec(replicas=gateways), health=HEALTH, executor="simulated")


def colocated(workers: int = 1, *, engine: EngineConfig = ENGINE) -> ClusterSpec:
    return replace(split(), pools=(PoolSpec("mixed", Role.MIXED, workers, engine=engine),))


def tiered(workers: int = 1, *, host: int = 100, disk: int = 1000, speed: int = 2_000_000_000) -> ClusterSpec:
    """Room for 300 blocks on each device, and for so many in host memory and on the disk of each worker."""
    (pool,) = colocated(workers, engine=replace(ENGINE, kv_blocks=302)).pools
    cache = CacheConfig(
        ByteSize(host * BLOCK_BYTES), DiskCacheConfig("/kv", ByteSize(disk * BLOCK_BYTES), ByteSize(speed))
    )
    return replace(colocated(), pools=(replace(pool, cache=cache),))


def models(spec: ClusterSpec, cost: LinearCost = COST) -> dict[str, PoolModel]:
    return {pool.name: PoolModel(cost) for pool in spec.pools}


def steady(count: int, gap_s: float, prompt: int = 100, output: int = 10) -> Workload:
    """Equal requests at equal times."""
    return Workload("steady", tuple(Arrival(index * gap_s, prompt, output) for index in range(count)))
