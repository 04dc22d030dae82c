"""Workers to simulate, from a model and a GPU or from a profile: how much KV they hold, what their steps cost."""

from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.offline.sim.case import PoolModel
from cluster.offline.sim.systems import EqualWorkers
from cluster.spec import ClusterSpec, PoolSpec, Role, SpecError
from workers.config import QUANTIZED, EngineConfig, ParallelConfig
from workers.profiles.capacity import kv_capacity_tokens
from workers.profiles.hardware import Hardware, hardware_of
from workers.profiles.shapes import ModelShape, shape_of
from workers.profiles.sources import BEST, INTER_NODE, NetworkLink, link_of, profile_of

if TYPE_CHECKING:
    from cluster.offline.sim.cluster import Environment
    from workers.profiles.measured import ClusterProfile

_HAS_PROMPTS = {"prefill": (True,), "decode": (False,), "": (True, False)}  # of steps, by the phase of `Interference`
MAX_RUNNING = 256  # sequences of one worker; vLLM's default


def pool_model(
    model: str | ModelShape,
    hardware: str | Hardware,
    parallel: ParallelConfig,
    *,
    source: str = BEST,
    link: str | NetworkLink = INTER_NODE,
) -> PoolModel:
    """Workers of this model on `parallel.world_size` GPUs each. `link` (in a node, or across) carries their KV.

    Raises `ProfileError` for unknown names and impossible parallelism.
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


def fleet(model: str, hardware: str, parallel: ParallelConfig, workers: int) -> EqualWorkers:
    """Equal workers with as much KV as their memory has room for. Raises `ProfileError` and `DoesNotFit`."""
    tokens = kv_capacity_tokens(model, hardware, parallel.tensor, parallel.pipeline)
    block_size = shape_of(model).block_size
    engine = EngineConfig(
        block_size=block_size,
        kv_blocks=tokens // block_size,
        max_batch_tokens=2048,
        max_running=MAX_RUNNING,
        max_waiting=1 << 20,
    )
    return EqualWorkers(model, workers, engine, parallel)


def with_kv_blocks(spec: ClusterSpec) -> ClusterSpec:
    """Set a missing `kv_blocks` to what the pool's `hardware` has room for. Raises `SpecError` and `ProfileError`."""
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
    shape = _shape(spec, pool)
    block_size = shape.block_size if shape.linear else pool.engine.block_size
    blocks = kv_capacity_tokens(shape, pool.hardware, *ranks, share) // block_size
    return replace(pool, engine=replace(pool.engine, block_size=block_size, kv_blocks=blocks))


def _shape(spec: ClusterSpec, pool: PoolSpec) -> ModelShape:
    """The pool's model; its KV has the dtype of the weights unless it is quantized. Blocks of linear attention have the
    size that a worker chooses, if the file has none."""
    shape = shape_of(pool.model or spec.model)
    if shape.linear and pool.engine.block_size != EngineConfig().block_size:
        shape = replace(shape, block_size=pool.engine.block_size)
    return replace(shape, kv_dtype=pool.engine.dtype) if pool.engine.dtype in QUANTIZED else shape


def models_of(spec: ClusterSpec, *, source: str = BEST, link: str = INTER_NODE) -> dict[str, PoolModel]:
    """By pool name of a cluster file, from a pool's measured `cost`, else from its `hardware`.

    The size of the KV follows from the model, whose shape must be known. All transfers are as fast as the slowest
    worker, over the links of all its GPUs. Raises `SpecError`.
    """
    ways = {pool.name: link_of(pool.hardware, link) for pool in spec.pools if pool.cost is None and pool.hardware}
    slowest_s = max(
        (ways[pool.name].byte_s / pool.parallel.world_size for pool in spec.pools if pool.name in ways), default=0.0
    )
    made: dict[str, PoolModel] = {}
    for pool in spec.pools:
        shape = _shape(spec, pool)
        if pool.cost is not None:
            made[pool.name] = PoolModel(pool.cost, shape.kv_bytes_per_token, vocab_size=shape.vocab, shape=shape)
        elif pool.hardware:
            way = replace(ways[pool.name], byte_s=slowest_s * pool.parallel.world_size)
            made[pool.name] = pool_model(shape, pool.hardware, pool.parallel, source=source, link=way)
        else:
            raise SpecError(
                f"pools: {pool.name} has neither cost (measure it with `diptych profile`) nor hardware (a GPU's name): "
                "how long its steps take is unknown"
            )
    return made


def measured_models(profile: "ClusterProfile", spec: ClusterSpec) -> dict[str, PoolModel]:
    """By pool name. Raises `ProfileError` for a pool that the profile lacks."""
    return {
        pool.name: PoolModel(
            profile.cost(pool.name),
            kv_token_bytes=profile.kv_token_bytes or 4,  # if no KV moved in the profile, none will here
            context_length=profile.context_length,
            vocab_size=profile.vocab_size,
            call_s=profile.pool(pool.name).call_s,
            idle_ratio=1.0 if pool.role is Role.DECODE else profile.idle_ratio(pool.name),
        )
        for pool in spec.pools
    }


def environment_of(profile: "ClusterProfile") -> "Environment":
    """All measured workers share one machine, if any two of them were measured side by side."""
    from cluster.offline.sim.cluster import Environment

    slowdown = {
        ((each.pool, has_prompts), (each.other, other_has_prompts)): each.ratio
        for each in profile.interference
        for has_prompts in _HAS_PROMPTS[each.phase]
        for other_has_prompts in _HAS_PROMPTS[each.other_phase]
    }
    return Environment(slowdown or None, profile.frontend_s)
