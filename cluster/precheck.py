"""Checks a specification before anything starts, against the model's config.json and this machine's devices.

Ray itself checks that there is room for the workers.
"""

from dataclasses import replace
from pathlib import Path

from cluster.spec import ClusterSpec, PoolSpec, Role, SpecError
from diptych.view import Adapter
from workers.config import EngineConfig
from workers.errors import ModelError
from workers.model.store import (
    ModelConfig,
    check_parallel,
    find_adapter,
    min_block_size,
    read_model_config,
    read_origin,
    resolve,
)

# Device files of GPU drivers: NVIDIA on PCs, boards and WSL, AMD, Intel and others.
_DEVICES = ("nvidia[0-9]*", "nvhost*", "nvgpu*", "dxg", "kfd", "dri/renderD*", "accel*")


def check_model(spec: ClusterSpec, folder: Path, name: str = "") -> None:
    """Raises `SpecError` for a pool that does not fit the model in `folder`, `ModelError` for a bad model.

    `name`: of this model; empty: the only one.
    """
    model = read_model_config(folder)
    pools = spec.pools_of(name or spec.model)
    for index, pool in enumerate(spec.pools):
        if pool not in pools:
            continue
        path = f"pools[{index}]"
        _check_parallel(pool, path, model)
        if pool.engine.weights == "gguf" and read_origin(folder) is None:
            raise SpecError(
                f"{path}.engine.weights is gguf, but {folder} was not converted from a GGUF file; name a .gguf file as "
                "the model, or take q8_0"
            )
        if pool.engine.weights != "float32" and _on_gpu(pool):
            raise SpecError(
                f"{path}.engine.weights is {pool.engine.weights}, which needs a CPU; on a GPU leave it out and set "
                "engine.dtype"
            )

    if name in ("", spec.model):
        read_adapters(spec)

    if len({_on_gpu(pool) for pool in pools if pool.engine.dtype == "auto"}) > 1:
        raise SpecError(
            "pools: engine.dtype is auto, which means another dtype on a GPU than on a CPU; set it in each pool"
        )


def with_block_sizes(spec: ClusterSpec) -> ClusterSpec:
    """The specification with the block size that each model needs, if its pools leave theirs out.

    Downloads a model that is not on this host. Raises `ModelError`.
    """
    for name in spec.models if spec.loads_models else ():
        pools = spec.pools_of(name)
        if any(pool.engine.block_size != EngineConfig().block_size for pool in pools):
            continue
        model = read_model_config(resolve(name).path)
        if least := max(min_block_size(model, _kv_dtype(pool)) for pool in pools):
            sized = (replace(pool, engine=replace(pool.engine, block_size=least)) if pool in pools else pool
                     for pool in spec.pools)  # fmt: skip
            spec = replace(spec, pools=tuple(sized))
    return spec


def read_adapters(spec: ClusterSpec) -> tuple[Adapter, ...]:
    """The specification's adapters, checked against its model. Reads their files. Raises `SpecError`."""
    found = []
    for name, path in spec.adapters.items():
        try:
            found.append(find_adapter(name, path, spec.model))
        except ModelError as error:
            raise SpecError(f"adapters.{name}: {error}") from None
    return tuple(found)


def _on_gpu(pool: PoolSpec) -> bool:
    return pool.engine.device.startswith("cuda") or bool(pool.resources.gpu and pool.engine.device != "cpu")


def _kv_dtype(pool: PoolSpec) -> str:
    """One of the size that a worker chooses for `auto`."""
    if pool.engine.dtype != "auto":
        return pool.engine.dtype
    return "bfloat16" if _on_gpu(pool) else "float32"


def check_readers(spec: ClusterSpec) -> None:
    """Raises `SpecError` if more workers may read from a prefill worker than it serves at once."""
    for pools in map(spec.pools_of, spec.models):
        readers = sum(pool.bounds[1] for pool in pools if pool.role is not Role.PREFILL)
        if readers > spec.transfer.max_readers and any(pool.role is Role.PREFILL for pool in pools):
            raise SpecError(
                f"transfer: max_readers is {spec.transfer.max_readers}, but {readers} workers may read from each "
                "prefill worker; raise it, and the limit of open files (ulimit -n) with it"
            )


def check_devices(spec: ClusterSpec, devices: Path = Path("/dev")) -> None:
    """Raises `SpecError` for a pool that needs a GPU on a machine without one."""
    if any(next(devices.glob(pattern), None) for pattern in _DEVICES):
        return
    for index, pool in enumerate(spec.pools):
        on_gpu = pool.engine.device.startswith("cuda")
        if not pool.bounds[1] or not (on_gpu or pool.resources.gpu):
            continue
        wants = f"resources.gpu is {pool.resources.gpu:g}" if pool.resources.gpu else "engine.device is cuda"
        raise SpecError(
            f"pools[{index}].{wants}, but this machine has no GPU; leave it out to serve on the CPU, or set "
            "RAY_ADDRESS to join a Ray cluster whose nodes have GPUs"
        )


def _check_parallel(pool: PoolSpec, path: str, model: ModelConfig) -> None:
    try:
        check_parallel(model, pool.parallel)
    except ModelError as error:
        raise SpecError(f"{path}.{error}") from None
