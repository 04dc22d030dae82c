"""What of a cluster's description cannot work here, found before anything starts: Ray, processes, weights.

Knows the description, the model's config.json and which devices this machine has; whether there is room is for Ray.
"""

from pathlib import Path

from cluster.spec import ClusterSpec, PoolSpec, SpecError
from workers.errors import ModelError
from workers.model.config import read_model_config
from workers.model.description import ModelConfig
from workers.model.shard import check_parallel

# Files of GPUs' drivers: NVIDIA, AMD, NVIDIA under WSL, Intel and others.
_DEVICES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*", "accel*")


def check_model(spec: ClusterSpec, folder: Path) -> None:
    """Raises `SpecError` for a pool whose settings the model in `folder` cannot fill, `ModelError` for the model."""
    model = read_model_config(folder)
    for index, pool in enumerate(spec.pools):
        _check_parallel(pool, f"pools[{index}]", model)


def check_devices(spec: ClusterSpec, devices: Path = Path("/dev")) -> None:
    """Raises `SpecError` for a pool that needs a GPU where this machine, with all its workers, has none."""
    if any(next(devices.glob(pattern), None) for pattern in _DEVICES):
        return
    for index, pool in enumerate(spec.pools):
        wants = f"engine.device is {pool.engine.device}" if pool.engine.device.startswith("cuda") else ""
        if pool.resources.gpu:
            wants = f"resources.gpu is {pool.resources.gpu:g}"
        if wants and pool.bounds[1]:
            raise SpecError(
                f"pools[{index}].{wants}, but this machine has no GPU; leave it out to serve on the CPU, or set "
                "RAY_ADDRESS to join a Ray cluster whose nodes have GPUs"
            )


def _check_parallel(pool: PoolSpec, path: str, model: ModelConfig) -> None:
    try:
        check_parallel(model, pool.parallel)
    except ModelError as error:
        raise SpecError(f"{path}.{error}") from None
