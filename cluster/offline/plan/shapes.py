"""Possible instances: the ways to shard a model that fit, and the pairs of them that fit in a node. Pure.

Zhong et al., DistServe (OSDI'24), algorithms 1 and 2, and its repository's test of which pairs keep KV inside nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cluster.offline.plan.deploy import WorkerGroup
from cluster.offline.plan.request import PlanError, PlanRequest
from cluster.offline.sim.systems import PROMPT_BATCH
from cluster.spec import Role
from workers.profiles.capacity import kv_capacity_tokens, min_gpus
from workers.profiles.hardware import Hardware
from workers.profiles.profile_errors import ProfileError
from workers.profiles.sources import profile_of

CHUNKS = (128, 256, 512, 1024, 2048)
PROMPT_STEPS = (512, PROMPT_BATCH)
MAX_STAGES = 8


def instances(request: PlanRequest) -> list[WorkerGroup]:
    """All shapes that fit on at most `request.gpus` GPUs of each kind. Raises `PlanError` when there is none.

    A tensor group stays in a node. Stages divide the layers evenly, if any number of them does.
    """
    found, refused = [], None
    for name, sheet in request.sheets.items():
        for tensor, pipeline in _fitting(request, sheet):
            try:
                profile_of(request.shape, sheet, tensor, pipeline, request.sources[name])
            except ProfileError as error:
                refused = error
                continue
            found.append(WorkerGroup(Role.MIXED, name, tensor, pipeline))
    if not found and refused is not None:
        raise PlanError(str(refused))
    if not found:
        raise PlanError(f"{request.shape.name} does not fit: {_needs(request)}; {request.gpus} were given")
    return found


def _fitting(request: PlanRequest, sheet: Hardware) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) with room for weights and a block of KV."""
    layers = request.shape.layers
    is_prime = all(layers % stages for stages in range(2, MAX_STAGES + 1))  # up to these
    for tensor in range(1, min(sheet.gpus_per_node, request.gpus) + 1):
        for pipeline in range(1, min(MAX_STAGES, request.gpus // tensor) + 1):
            try:
                fits = kv_capacity_tokens(request.shape, sheet, tensor, pipeline) >= request.shape.block_size
            except ProfileError:
                continue
            if fits and (is_prime or layers % pipeline == 0):
                yield tensor, pipeline


def _needs(request: PlanRequest) -> str:
    def needed(name: str, sheet: Hardware) -> str:
        try:
            gpus, (tensor, pipeline) = min_gpus(request.shape, sheet)
        except ProfileError:
            return f"no number of {name} holds it"
        most = f", but a plan has at most {MAX_STAGES} stages" if pipeline > MAX_STAGES else ""
        return f"it needs {gpus} {name} at least, as TP {tensor}, PP {pipeline}{most}"

    return "; ".join(needed(name, sheet) for name, sheet in request.sheets.items())


def colocated(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    """Every shape with every chunk size, and prefill-first."""
    chunked = [replace(shape, batch_tokens=chunk) for shape in shapes for chunk in CHUNKS]
    return chunked + [replace(shape, batching="prefill-first", batch_tokens=PROMPT_BATCH) for shape in shapes]


def prefills(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    return [replace(shape, role=Role.PREFILL, batch_tokens=size) for shape in shapes for size in PROMPT_STEPS]


def decodes(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    return [replace(shape, role=Role.DECODE) for shape in shapes]


def close_pairs(request: PlanRequest, shapes: Sequence[WorkerGroup]) -> list[tuple[WorkerGroup, WorkerGroup]]:
    """Prefill and decode instances whose KV can stay inside nodes.

    Both are divided into the same number of segments of pipeline stages, and segments with the same layers share a
    node.
    """
    return [
        (one, two)
        for one in prefills(shapes)
        for two in decodes(shapes)
        if one.batch_tokens == PROMPT_BATCH and one.hardware == two.hardware and is_close(request, one, two)
    ]


def is_close(request: PlanRequest, prefill: WorkerGroup, decode: WorkerGroup) -> bool:
    sheet = request.sheets[prefill.hardware]
    nodes = request.nodes or -(-request.gpus // sheet.gpus_per_node)
    return prefill.gpus_each + decode.gpus_each <= request.gpus and any(
        prefill.pipeline % segments == 0
        and decode.pipeline % segments == 0
        and (prefill.gpus_each + decode.gpus_each) // segments <= sheet.gpus_per_node
        for segments in range(1, nodes + 1)
    )
