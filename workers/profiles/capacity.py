"""How many tokens of KV an instance holds beside its weights."""

import math

from workers.profiles.computed import check_parallel
from workers.profiles.hardware import Hardware, hardware_of
from workers.profiles.profile_errors import DoesNotFit, ProfileError
from workers.profiles.published import distserve_capacity
from workers.profiles.shapes import SHAPES, ModelShape, shape_of

# Of a GPU's memory, for weights and KV; the rest is for activations and the runtime. vLLM's default; DistServe's table
# of capacities follows from 0.93 on GPUs of 80 GiB.
UTILISATION = 0.9


def kv_capacity_tokens(
    model: str | ModelShape,
    hardware: str | Hardware,
    tensor: int = 1,
    pipeline: int = 1,
    utilisation: float = UTILISATION,
) -> int:
    """Tokens of KV in `tensor` times `pipeline` GPUs: DistServe's measured table where it has them, else arithmetic.

    Raises `DoesNotFit`, which names the fewest GPUs that would do, and `ProfileError` on an impossible split.
    """
    shape, sheet = shape_of(model), hardware_of(hardware)
    check_parallel(shape, sheet, tensor, pipeline)
    if not 0.0 < utilisation <= 1.0:
        raise ProfileError(f"utilisation is {utilisation}; it must be above 0 and at most 1")
    if utilisation == UTILISATION and SHAPES.get(shape.name) == shape:
        known = distserve_capacity().get((shape.name, sheet.name, tensor, pipeline))
        if known is not None:
            return known
    tokens = _tokens(shape, sheet, tensor, pipeline, utilisation)
    if tokens < 1:
        least, best = least_gpus(shape, sheet, utilisation)
        raise DoesNotFit(
            f"{shape.name} does not fit on {tensor * pipeline} {sheet.name} (TP {tensor}, PP {pipeline}): its weights "
            f"take {shape.weight_bytes / 2**30:.1f} GiB, and {utilisation:.0%} of the memory is "
            f"{tensor * pipeline * sheet.memory_bytes * utilisation / 2**30:.1f} GiB; it needs {least} at least, "
            f"as TP {best[0]}, PP {best[1]}",
            least,
        )
    return tokens


def least_gpus(
    model: str | ModelShape, hardware: str | Hardware, utilisation: float = UTILISATION
) -> tuple[int, tuple[int, int]]:
    """The fewest GPUs that hold the model and a token, and their (tensor, pipeline), the most tensor ranks first.

    Raises `DoesNotFit` with 0 when one layer is too much for all GPUs of a node.
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
            if _tokens(shape, sheet, tensor, gpus // tensor, utilisation) > 0:
                return gpus, (tensor, gpus // tensor)
    raise DoesNotFit(f"{shape.name} does not fit on any number of {sheet.name}", 0)


def _tokens(shape: ModelShape, sheet: Hardware, tensor: int, pipeline: int, utilisation: float) -> int:
    """By the rank that holds most: the largest stage's layers and the embeddings or the head; of each token the KV of
    those layers and of its heads. Tensor ranks beyond the KV heads hold copies.
    """
    part = math.ceil(shape.layers / pipeline) / shape.layers  # of all layers
    outside = shape.parameters - shape.layer_parameters
    if pipeline > 1 and not shape.tied:
        outside -= shape.head_parameters  # the other end's
    weight_bytes = (shape.layer_parameters * part + outside) * shape.element_bytes / tensor
    token_bytes = shape.kv_bytes_per_token * part / min(tensor, shape.kv_heads)
    return max(0, int((sheet.memory_bytes * utilisation - weight_bytes) / token_bytes))
