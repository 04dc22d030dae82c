"""Which instances there can be: ways to cut a model over GPUs that fit, and pairs of them that a network allows. Pure.

Zhong et al., DistServe (OSDI'24), algorithms 1 and 2, and its repository's test of which pairs a slow network allows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cluster.offline.plan.asked import PlanError, PlanRequest
from cluster.offline.plan.deploy import PROMPT_BATCH, WorkerGroup
from cluster.offline.sim.fleet import BLOCK_SIZE
from cluster.spec import Role
from workers.profiles.capacity import kv_capacity_tokens, least_gpus
from workers.profiles.hardware import Hardware
from workers.profiles.profile_errors import ProfileError
from workers.profiles.sources import profile_of

CHUNKS = (128, 256, 512, 1024, 2048)
PROMPT_STEPS = (512, PROMPT_BATCH)
MOST_STAGES = 8


def instances(asked: PlanRequest) -> list[WorkerGroup]:
    """All shapes that fit on at most `asked.gpus` GPUs, of each kind. Raises `PlanError` when there is none.

    A tensor group stays in a node. Stages divide the layers evenly.
    """
    found, refused = [], None
    for name, sheet in asked.sheets.items():
        for tensor, pipeline in _cuts(asked, sheet):
            try:
                profile_of(asked.shape, sheet, tensor, pipeline, asked.sources[name])
            except ProfileError as error:
                refused = error
                continue
            found.append(WorkerGroup(Role.MIXED, name, tensor, pipeline))
    if not found and refused is not None:
        raise PlanError(str(refused))
    if not found:
        raise PlanError(f"{asked.shape.name} does not fit: {_needs(asked)}; {asked.gpus} were given")
    return found


def _cuts(asked: PlanRequest, sheet: Hardware) -> Iterator[tuple[int, int]]:
    for tensor in range(1, min(sheet.gpus_per_node, asked.gpus) + 1):
        for pipeline in range(1, min(MOST_STAGES, asked.gpus // tensor) + 1):
            if asked.shape.layers % pipeline == 0 and _fits(asked, sheet, tensor, pipeline):
                yield tensor, pipeline


def _fits(asked: PlanRequest, sheet: Hardware, tensor: int, pipeline: int) -> bool:
    try:
        return kv_capacity_tokens(asked.shape, sheet, tensor, pipeline) >= BLOCK_SIZE
    except ProfileError:
        return False


def _needs(asked: PlanRequest) -> str:
    def needed(name: str, sheet: Hardware) -> str:
        try:
            gpus, (tensor, pipeline) = least_gpus(asked.shape, sheet)
        except ProfileError:
            return f"no number of {name} holds it"
        return f"it needs {gpus} {name} at least, as TP {tensor}, PP {pipeline}"

    return "; ".join(needed(name, sheet) for name, sheet in asked.sheets.items())


def colocated(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    """Every shape with every chunk size, and computing whole prompts first."""
    chunked = [replace(shape, batch_tokens=chunk) for shape in shapes for chunk in CHUNKS]
    return chunked + [replace(shape, batching="prefill-first", batch_tokens=PROMPT_BATCH) for shape in shapes]


def prefills(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    return [replace(shape, role=Role.PREFILL, batch_tokens=size) for shape in shapes for size in PROMPT_STEPS]


def decodes(shapes: Sequence[WorkerGroup]) -> list[WorkerGroup]:
    return [replace(shape, role=Role.DECODE) for shape in shapes]


def close_pairs(asked: PlanRequest, shapes: Sequence[WorkerGroup]) -> list[tuple[WorkerGroup, WorkerGroup]]:
    """Prefill and decode instances whose KV need not leave a node: both are cut into the same number of segments, each
    of some stages, and segments that hold the same layers stand in one node."""
    whole = [shape for shape in prefills(shapes) if shape.batch_tokens == PROMPT_BATCH]
    return [
        (one, two)
        for one in whole
        for two in decodes(shapes)
        if one.hardware == two.hardware and is_close(asked, one, two)
    ]


def is_close(asked: PlanRequest, prefill: WorkerGroup, decode: WorkerGroup) -> bool:
    sheet = asked.sheets[prefill.hardware]
    nodes = asked.nodes or -(-asked.gpus // sheet.gpus_per_node)
    return prefill.gpus_each + decode.gpus_each <= asked.gpus and any(
        prefill.pipeline % segments == 0
        and decode.pipeline % segments == 0
        and (prefill.gpus_each + decode.gpus_each) // segments <= sheet.gpus_per_node
        for segments in range(1, nodes + 1)
    )
