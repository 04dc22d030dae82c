"""The best cost model for a model on a GPU: published fit, else measured table, else operators, else roofline.

distserve        fits of DistServe's engine: OPT on A100
distserve-vllm   the same authors' fits of vLLM; only by name
splitwise        measured steps: Llama-2-70B and BLOOM on A100 and H100
vidur            measured operators: Llama on A100 and H100
roofline         any shape on any data sheet
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from workers.costs import CostModel
from workers.costs.port import check_non_negative
from workers.costs.profiled import ProfiledCost
from workers.profiles.computed import LINK, MEMORY, SEND_S, check_parallel, roofline
from workers.profiles.hardware import Hardware, hardware_of
from workers.profiles.profile_errors import ProfileError, UnknownName
from workers.profiles.published import (
    Key,
    distserve,
    distserve_fits,
    splitwise,
    splitwise_medians,
    vidur,
    vidur_layers,
    vidur_links,
)
from workers.profiles.shapes import SHAPES, ModelShape, shape_of

BEST = "best"
INTER_NODE, INTRA_NODE = LINKS = "inter-node", "intra-node"


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """From one GPU to another: seconds per transfer and per byte."""

    latency_s: float
    byte_s: float
    provenance: str

    def __post_init__(self) -> None:
        check_non_negative(self, "link.", ProfileError)


@dataclass(frozen=True, slots=True)
class Profile:
    """A cost model, and where its figures come from."""

    cost: CostModel
    source: str
    provenance: str


@dataclass(frozen=True, slots=True)
class _Source:
    build: Callable[[ModelShape, Hardware, int, int], ProfiledCost | None]
    known: Callable[[], Mapping[Key, object]]
    words: str


_SOURCES = {
    "distserve": _Source(distserve, partial(distserve_fits, "distserve"), "DistServe's fits of its own engine"),
    "splitwise": _Source(splitwise, splitwise_medians, "medians of Splitwise's measured steps"),
    "vidur": _Source(vidur, vidur_layers, "Vidur's measured operators, attention by roofline"),
    "distserve-vllm": _Source(
        partial(distserve, engine="vllm"), partial(distserve_fits, "vllm"), "DistServe's fits of vLLM"
    ),
}
_BEST = ("distserve", "splitwise", "vidur")
SOURCES = (*_SOURCES, "roofline")


def profile_of(
    model: str | ModelShape,
    hardware: str | Hardware,
    tensor: int = 1,
    pipeline: int = 1,
    source: str = BEST,
    link: str | NetworkLink = INTER_NODE,
) -> Profile:
    """The cost model of an instance of `tensor` times `pipeline` GPUs, which all send its KV over `link`.

    `source`: one of `SOURCES`, or "best". Raises `ProfileError` for an unknown name (with the nearest), parallelism
    that no engine would run, and a source without data (with what it has).
    """
    shape, sheet = shape_of(model), hardware_of(hardware)
    check_parallel(shape, sheet, tensor, pipeline)
    name, cost, words = _steps(shape, sheet, tensor, pipeline, source)
    used_link = link if isinstance(link, NetworkLink) else link_of(sheet, link)
    gpus = tensor * pipeline
    whole = replace(
        cost,
        transfer_latency_s=used_link.latency_s,
        transfer_byte_s=used_link.byte_s / gpus,
        swap_byte_s=1.0 / (sheet.host_link_byte_s * MEMORY * gpus),
    )
    setting = f"{shape.name} on {sheet.name}, TP {tensor}, PP {pipeline}"
    return Profile(
        whole, name, f"steps of {setting}: {words}; transfers by {gpus} GPU{'s' * (gpus > 1)}: {used_link.provenance}"
    )


def _steps(
    shape: ModelShape, sheet: Hardware, tensor: int, pipeline: int, source: str
) -> tuple[str, ProfiledCost, str]:
    if source not in (BEST, *SOURCES):
        raise UnknownName("source of costs", source, (BEST, *SOURCES))
    for name in _BEST if source == BEST else (source,) if source in _SOURCES else ():
        # Measurements only hold for the model as published: the same number format and sizes.
        if SHAPES.get(shape.name) == shape and (cost := _SOURCES[name].build(shape, sheet, tensor, pipeline)):
            return name, cost, _SOURCES[name].words
    if source in _SOURCES:
        raise ProfileError(
            f"{source} has no {shape.name} on {sheet.name} at TP {tensor}; it has {_listed(_SOURCES[source].known())}. "
            "The roofline has any model and hardware"
        )
    return "roofline", roofline(shape, sheet, tensor, pipeline), "roofline from the model's shape and the data sheet"


def _listed(known: Mapping[Key, object]) -> str:
    tensors: dict[tuple[str, str], list[str]] = {}
    for model, hardware, tensor in sorted(known):
        tensors.setdefault((model, hardware), []).append(str(tensor))
    return "; ".join(f"{model} on {hardware} at TP {', '.join(found)}" for (model, hardware), found in tensors.items())


def link_of(hardware: str | Hardware, where: str = INTER_NODE) -> NetworkLink:
    """Vidur's measured sends on DGX nodes where they exist, else the data sheet's link at `LINK` of its speed.

    The latency is the smallest message's time, the rate that between the smallest and the largest.
    """
    sheet = hardware_of(hardware)
    if where not in LINKS:
        raise UnknownName("link", where, LINKS)
    if (sends := vidur_links().get((sheet.name, "send_recv", where, 2))) is not None:
        byte_s = (sends.ys[-1] - sends.ys[0]) / (sends.xs[-1] - sends.xs[0])
        return NetworkLink(sends.ys[0], byte_s, f"Vidur's measured sends ({where})")
    rate = sheet.node_link_byte_s if where == INTRA_NODE else sheet.cross_link_byte_s
    return NetworkLink(SEND_S, 1.0 / (rate * LINK), f"data sheet ({where})")
