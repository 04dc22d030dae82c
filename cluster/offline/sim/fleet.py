"""From a model and a GPU to workers that can be simulated: how much KV they hold, what steps and hand-offs cost."""

from dataclasses import replace

from cluster.offline.sim.cluster import PoolModel, Surroundings
from cluster.offline.sim.systems import Fleet
from cluster.spec import ClusterSpec, PoolSpec, SpecError
from workers.config import EngineConfig, ParallelConfig
from workers.profiles.capacity import kv_capacity_tokens
from workers.profiles.hardware import Hardware, hardware_of
from workers.profiles.measured import ClusterProfile
from workers.profiles.shapes import ModelShape, shape_of
from workers.profiles.sources import BEST, CROSS, NetworkLink, link_of, profile_of

BLOCK_SIZE = 16
MAX_RUNNING = 256  # sequences of one worker; vLLM's default


def pool_model(
    model: str | ModelShape,
    hardware: str | Hardware,
    parallel: ParallelConfig,
    *,
    source: str = BEST,
    link: str | NetworkLink = CROSS,
) -> PoolModel:
    """Workers of this model on `parallel.world_size` GPUs each; KV comes to them over `link` (in a node, or across).

    Raises `ProfileError` for names that are not known and splits that cannot be.
    """
    shape, sheet = shape_of(model), hardware_of(hardware)
    cost = profile_of(shape, sheet, parallel.tensor, parallel.pipeline, source, link).cost
    return PoolModel(
        cost=cost,
        kv_token_bytes=shape.kv_bytes_per_token,
        vocab_size=shape.vocab,
        shape=shape,
        peak_flops=parallel.world_size * sheet.flops_of(shape.element_bytes),
    )


def fleet(model: str, hardware: str, parallel: ParallelConfig, workers: int) -> Fleet:
    """Equal workers with as much KV as their memory has room for. Raises `ProfileError`, `DoesNotFit` among them."""
    tokens = kv_capacity_tokens(model, hardware, parallel.tensor, parallel.pipeline)
    engine = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_blocks=tokens // BLOCK_SIZE,
        max_batch_tokens=2048,
        max_running=MAX_RUNNING,
        max_waiting=1 << 20,
    )
    return Fleet(model, workers, engine, parallel)


def with_kv_blocks(spec: ClusterSpec) -> ClusterSpec:
    """Pools without `kv_blocks` with as many as their `hardware` holds. Raises `SpecError`, `ProfileError`."""
    return replace(spec, pools=tuple(_sized(spec, index, pool) for index, pool in enumerate(spec.pools)))


def _sized(spec: ClusterSpec, index: int, pool: PoolSpec) -> PoolSpec:
    if pool.engine.kv_blocks:
        return pool
    if not pool.hardware:
        raise SpecError(
            f"pools[{index}].engine.kv_blocks is left out, so a worker chooses it when it starts: write it here (a "
            "running worker has it in `diptych status`), or name the pool's hardware"
        )
    ranks = pool.parallel.tensor, pool.parallel.pipeline
    share = pool.engine.gpu_memory_utilization
    tokens = kv_capacity_tokens(pool.model or spec.model, pool.hardware, *ranks, share)
    return replace(pool, engine=replace(pool.engine, kv_blocks=tokens // pool.engine.block_size))


def models_of(spec: ClusterSpec, *, source: str = BEST, link: str = CROSS) -> dict[str, PoolModel]:
    """What the pools of a cluster file are in simulation: their measured `cost`, else their `hardware`'s.

    A measured cost says nothing of how large the KV is: it must be a model whose shape is known. KV moves as
    fast as the workers with the slowest links, all of a worker's GPUs together, send or take it. Raises `SpecError`.
    """
    ways = {pool.name: link_of(pool.hardware, link) for pool in spec.pools if pool.cost is None and pool.hardware}
    slowest_s = max(
        (ways[pool.name].byte_s / pool.parallel.world_size for pool in spec.pools if pool.name in ways), default=0.0
    )
    made: dict[str, PoolModel] = {}
    for pool in spec.pools:
        shape = shape_of(pool.model or spec.model)
        if pool.cost is not None:
            made[pool.name] = PoolModel(pool.cost, shape.kv_bytes_per_token, vocab_size=shape.vocab, shape=shape)
        elif pool.hardware:
            way = replace(ways[pool.name], byte_s=slowest_s * pool.parallel.world_size)
            made[pool.name] = pool_model(shape, pool.hardware, pool.parallel, source=source, link=way)
        else:
            raise SpecError(
                f"pools: {pool.name} has neither cost (measure it with `diptych profile`) nor hardware (a GPU's name): "
                "nobody can say how long its steps take"
            )
    return made


UNKNOWN_TOKEN_BYTES = 4  # where no KV moved, none will


def measured_models(profile: ClusterProfile, spec: ClusterSpec) -> dict[str, PoolModel]:
    """By pool name. Raises `ProfileError` for a pool that was not measured."""
    return {
        pool.name: PoolModel(
            profile.cost(pool.name),
            kv_token_bytes=profile.kv_token_bytes or UNKNOWN_TOKEN_BYTES,
            context_length=profile.context_length,
            vocab_size=profile.vocab_size,
            call_s=profile.pool(pool.name).call_s,
        )
        for pool in spec.pools
    }


def surroundings_of(profile: ClusterProfile) -> Surroundings:
    """All measured workers on one machine, if any two of them were measured there side by side."""
    slowdown = {(each.pool, each.other): each.ratio for each in profile.neighbours}
    return Surroundings(slowdown or None, profile.door_s)
