"""The published measurements in data/ as cost models. Each function returns None where its source has no data."""

import csv
import json
from collections import defaultdict
from functools import cache
from typing import Any

from workers.costs import LayeredCost, PhasedCost, StepCurve, TableCost
from workers.profiles.computed import COMPUTE, LINK, MEMORY, SEND_S, context_seconds, stage_link_byte_s
from workers.profiles.hardware import DATA, Hardware
from workers.profiles.shapes import ModelShape, canonical

# Of a layer, by Vidur's names.
OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
Key = tuple[str, str, int]  # model, hardware, tensor parallelism
_DISTSERVE_GPU = "a100-80gb"
_VIDUR_GPUS = {"a100": ("a100-80gb",), "h100": ("h100-80gb",)}
_SAME_LINKS = {"a100": ("a100-40gb", "a100-80gb"), "h100": ("h100-80gb", "h100-80gb-pcap", "h200")}


@cache
def distserve_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / "distserve.json").read_text())
    return data


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (DATA / name).open(newline="") as file:
        return tuple(csv.DictReader(file))


# ---- DistServe ---------------------------------------------------------------------------------------------------


@cache
def distserve_fits(engine: str) -> dict[Key, dict[str, Any]]:
    """Coefficients by model, hardware and tensor parallelism. `engine`: "distserve" or "vllm"."""
    fits = distserve_data()["fits_ms"][engine]
    return {
        (canonical(model), _DISTSERVE_GPU, int(tensor)): fit
        for model, by_tensor in fits.items()
        for tensor, fit in by_tensor.items()
    }


@cache
def distserve_capacity() -> dict[tuple[str, str, int, int], int]:
    """(model, hardware, tensor, pipeline) to tokens of KV."""
    return {
        (canonical(model), _DISTSERVE_GPU, *map(int, split.split(","))): tokens  # type: ignore[misc]
        for model, by_split in distserve_data()["max_num_tokens"].items()
        for split, tokens in by_split.items()
    }


def distserve(
    shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int, engine: str = "distserve"
) -> PhasedCost | None:
    fit = distserve_fits(engine).get((shape.name, hardware.name, tensor))
    if fit is None:
        return None

    def seconds(coefficients: list[float]) -> tuple[float, float, float]:
        """From ms. Least-squares fits may decrease slightly with more work; step times do not."""
        a, b, c = (max(0.0, each / 1e3) for each in coefficients)
        return a, b, c

    return PhasedCost(
        prefill=seconds(fit["prefill"]),
        small_batch=seconds(fit["decoding_smallbs"]),
        large_batch=seconds(fit["decoding_largebs"]),
        border=fit["decoding_large_small_bs_threshold"],
        overhead_s=2e-3,  # DistServe's simulator: 2 ms and 1e-4 ms per token on the first stage,
        overhead_token_s=1e-7,
        prefill_stages_s=1e-3 * pipeline * pipeline,  # and the number of stages in ms on each stage of a prefill
    )


# ---- Splitwise ---------------------------------------------------------------------------------------------------


@cache
def splitwise_medians() -> dict[Key, dict[tuple[int, int], tuple[float, float]]]:
    """(prompt tokens, batch) to the medians of (prompt seconds, token seconds)."""
    found: dict[Key, dict[tuple[int, int], tuple[float, float]]] = defaultdict(dict)
    for row in _rows("splitwise.csv"):
        medians = float(row["prompt_ms"]) / 1e3, float(row["token_ms"]) / 1e3
        key = canonical(row["model"]), row["hardware"], int(row["tensor"])
        found[key][int(row["prompt"]), int(row["batch"])] = medians
    return dict(found)


def splitwise(shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int) -> TableCost | None:
    """One prompt by the rows of batch 1; several prompts and decodes by the rows of equal prompts in batches.

    The table has no pipelines: sends between stages are added from the data sheet.
    """
    medians = splitwise_medians().get((shape.name, hardware.name, tensor))
    if medians is None:
        return None
    common = max((length for length, batch in medians if batch > 1), default=512)
    one = StepCurve.rising((length, prompt_s) for (length, batch), (prompt_s, _) in medians.items() if batch == 1)
    many = {batch: times for (length, batch), times in medians.items() if length == common}
    fixed, slope = _hops(shape, hardware, tensor, pipeline)
    return TableCost(
        prompt=one.plus(fixed, slope),
        prompts=StepCurve.rising((common * batch, prompt_s) for batch, (prompt_s, _) in many.items()).plus(
            fixed, slope
        ),
        decode=StepCurve.rising((batch, token_s) for batch, (_, token_s) in many.items()).plus(fixed, slope),
        attention_share=shape.attention_flops_per_pair / (2 * shape.active_parameters),
    )


def _hops(shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int) -> tuple[float, float]:
    """Sends between stages: seconds per step, and per token."""
    byte_s = stage_link_byte_s(hardware, tensor, pipeline) * LINK
    return (pipeline - 1) * SEND_S, (pipeline - 1) * shape.hidden * shape.element_bytes / byte_s


# ---- Vidur -------------------------------------------------------------------------------------------------------


@cache
def vidur_layers() -> dict[Key, tuple[tuple[int, float], ...]]:
    """(tokens, seconds of one layer without attention), in rising order of tokens."""
    found: dict[Key, list[tuple[int, float]]] = defaultdict(list)
    for row in _rows("vidur_layers.csv"):
        seconds = sum(float(row[name]) for name in OPERATORS) / 1e3
        for hardware in _VIDUR_GPUS[row["hardware"]]:
            found[canonical(row["model"]), hardware, int(row["tensor"])].append((int(row["tokens"]), seconds))
    return {key: tuple(sorted(points)) for key, points in found.items()}


@cache
def vidur_links() -> dict[tuple[str, str, str, int], StepCurve]:
    """(hardware, "send_recv" or "all_reduce", "intra-node" or "inter-node", ranks) to the seconds by bytes."""
    found: dict[tuple[str, str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in _rows("vidur_links.csv"):
        for hardware in _SAME_LINKS[row["hardware"]]:
            key = hardware, row["kind"], row["where"], int(row["ranks"])
            found[key].append((float(row["bytes"]), float(row["ms"]) / 1e3))
    return {key: StepCurve.rising(points) for key, points in found.items()}


def vidur(shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int) -> LayeredCost | None:
    """A layer's operators and all-reduces as measured; attention and head as in the roofline."""
    points = vidur_layers().get((shape.name, hardware.name, tensor))
    if points is None:
        return None
    activation_bytes = shape.hidden * shape.element_bytes
    links = vidur_links()
    where = "intra-node" if tensor * pipeline <= hardware.gpus_per_node else "inter-node"
    send = links[hardware.name, "send_recv", where, 2]
    both_sums = [0.0] * len(points)
    if tensor > 1:
        add_up = links[hardware.name, "all_reduce", "intra-node", tensor]
        both_sums = [2 * add_up(tokens * activation_bytes) for tokens, _ in points]
    head_s = shape.head_parameters * shape.element_bytes / (tensor * hardware.memory_byte_s * MEMORY)
    flops = hardware.flops_of(shape.element_bytes) * COMPUTE * tensor
    steps = StepCurve.rising(
        (tokens, shape.layers * (layer_s + sums_s) + (pipeline - 1) * send(tokens * activation_bytes))
        for (tokens, layer_s), sums_s in zip(points, both_sums, strict=True)
    )
    return LayeredCost(
        tokens=steps.plus(head_s, 0.0),
        pair_s=shape.attention_flops_per_pair / flops,
        context_s=context_seconds(shape, hardware, tensor),
    )
