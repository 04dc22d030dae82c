"""How many tokens of KV fit beside the weights of an instance."""

import math

from workers.profiles.computed import check_parallel
from workers.profiles.hardware import Hardware, hardware_of
from workers.profiles.profile_errors import DoesNotFit, ProfileError
from workers.profiles.published import distserve_capacity
from workers.profiles.shapes import SHAPES, ModelShape, shape_of

# Share of a GPU's memory for weights and KV; the rest is for activations and the runtime. vLLM's default. DistServe's
# table of capacities follows from 0.93 on GPUs of 80 GiB.
UTILIZATION = 0.9


def kv_capacity_tokens(
    model: str | ModelShape,
    hardware: str | Hardware,
    tensor: int = 1,
    pipeline: int = 1,
    utilization: float = UTILIZATION,
) -> int:
    """Of an instance of `tensor` times `pipeline` GPUs: from DistServe's measured table, else computed.

    Raises `DoesNotFit`, which names the fewest GPUs needed, and `ProfileError` for impossible parallelism.
    """
    shape, sheet = shape_of(model), hardware_of(hardware)
    check_parallel(shape, sheet, tensor, pipeline)
    if not 0.0 < utilization <= 1.0:
        raise ProfileError(f"utilization is {utilization}; it must be above 0 and at most 1")
    if utilization == UTILIZATION and SHAPES.get(shape.name) == shape:
        known = distserve_capacity().get((shape.name, sheet.name, tensor, pipeline))
        if known is not None:
            return known
    tokens = _tokens(shape, sheet, tensor, pipeline, utilization)
    if tokens < shape.block_size:
        least, best = min_gpus(shape, sheet, utilization)
        raise DoesNotFit(
            f"{shape.name} does not fit on {tensor * pipeline} {sheet.name} (TP {tensor}, PP {pipeline}): its weights "
            f"take {shape.weight_bytes / 2**30:.1f} GiB, and {utilization:.0%} of the memory is "
            f"{tensor * pipeline * sheet.memory_bytes * utilization / 2**30:.1f} GiB; it needs {least} at least, "
            f"as TP {best[0]}, PP {best[1]}"
        )
    return tokens


def min_gpus(
    model: str | ModelShape, hardware: str | Hardware, utilization: float = UTILIZATION
) -> tuple[int, tuple[int, int]]:
    """The fewest GPUs that hold the model and a block, and their (tensor, pipeline), the most tensor ranks first.

    Raises `DoesNotFit` when one layer is too large for all GPUs of a node.
    """
    shape, sheet = shape_of(model), hardware_of(hardware)
    for gpus in range(1, sheet.gpus_per_node * shape.layers + 1):
        for tensor in range(min(gpus, sheet.gpus_per_node), 0, -1):
            if gpus % tensor:
                continue
            try:
                check_parallel(shape, sheet, tensor, gpus // tensor)
            except ProfileError:
                continue
            if _tokens(shape, sheet, tensor, gpus // tensor, utilization) >= shape.block_size:
                return gpus, (tensor, gpus // tensor)
    raise DoesNotFit(f"{shape.name} does not fit on any number of {sheet.name}")


def _tokens(shape: ModelShape, sheet: Hardware, tensor: int, pipeline: int, utilization: float) -> int:
    """By the rank with the largest stage: its layers, and the embeddings or the head.

    Tensor ranks beyond the KV heads hold copies of KV.
    """
    part = math.ceil(shape.layers / pipeline) / shape.layers  # of all layers
    outside = shape.parameters - shape.layer_parameters
    if pipeline > 1 and not shape.tied:
        outside -= shape.head_parameters  # the other end's
    weight_bytes = (shape.layer_parameters * part + outside) * shape.element_bytes / tensor
    token_bytes = shape.kv_bytes_per_token * part / min(tensor, shape.kv_heads)
    return max(0, int((sheet.memory_bytes * utilization - weight_bytes) / token_bytes))
