"""Step times from a model's shape and a machine's data sheet, for hardware without measurements."""

from dataclasses import dataclass

from workers.costs import RooflineCost
from workers.profiles.hardware import Hardware
from workers.profiles.profile_errors import ProfileError
from workers.profiles.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What part of a data sheet a good engine reaches, and what a step costs beside it.

    `compute`: DistServe's prefill fits on A100 grow by a token in what 0.77 to 0.81 of the peak takes at TP 1 and 2,
    Splitwise's tables in less. `memory`: its OPT-13B decode at TP 1. `link`: Vidur's sums over 8 GPUs of a node, 67 MB:
    174 of 300 GB/s on A100, 365 of 450 on H100. `sum_s`: its small sums over 8, 62 µs on A100 and 37 µs on H100.
    `layer_s`: kernels of a layer that wait to be launched; what DistServe's decode at TP 1 leaves unexplained.
    """

    compute: float = 0.75
    memory: float = 0.8
    link: float = 0.65
    layer_s: float = 0.1e-3
    sum_s: float = 40e-6
    send_s: float = 20e-6


GOOD_ENGINE = Efficiency()


def check_parallel(shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int) -> None:
    """Raises `ProfileError` on a split that no engine would run."""
    if min(tensor, pipeline) < 1:
        raise ProfileError(f"tensor {tensor} and pipeline {pipeline}: both must be 1 or more")
    if shape.heads % tensor or (shape.kv_heads % tensor and tensor % shape.kv_heads):
        raise ProfileError(
            f"{tensor} tensor ranks cannot share the {shape.heads} heads and {shape.kv_heads} KV heads of {shape.name}"
        )
    if pipeline > shape.layers:
        raise ProfileError(f"{shape.name} has {shape.layers} layers, too few for {pipeline} stages")
    if tensor > hardware.gpus_per_node:
        raise ProfileError(
            f"{tensor} tensor ranks do not fit in a node of {hardware.gpus_per_node} {hardware.name}; "
            "sums over a network between nodes are too slow, use pipeline stages"
        )


def stage_link_byte_s(hardware: Hardware, tensor: int, pipeline: int) -> float:
    """Bytes/s between stages: within a node when all of the instance is in one."""
    inside = tensor * pipeline <= hardware.gpus_per_node
    return hardware.node_link_byte_s if inside else hardware.cross_link_byte_s


def context_seconds(shape: ModelShape, hardware: Hardware, tensor: int, efficiency: Efficiency = GOOD_ENGINE) -> float:
    """Reading a token's KV in all layers. Ranks beyond the KV heads hold copies, and save nothing."""
    ranks = min(tensor, shape.kv_heads)
    return shape.kv_bytes_per_token / (ranks * hardware.memory_byte_s * efficiency.memory)


def roofline(
    shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int, efficiency: Efficiency = GOOD_ENGINE
) -> RooflineCost:
    """Two sums of activations over the tensor ranks in each layer (a ring: each rank sends 2(T-1)/T of them), and one
    send between stages. Raises `ProfileError`."""
    check_parallel(shape, hardware, tensor, pipeline)
    flops = hardware.flops_of(shape.element_bytes) * efficiency.compute * tensor
    weights = shape.layer_parameters + shape.head_parameters
    activation_bytes = shape.hidden * shape.element_bytes
    sums, hops = 2 * shape.layers * (tensor > 1), pipeline - 1
    ring_byte_s = hardware.node_link_byte_s * efficiency.link
    hop_byte_s = stage_link_byte_s(hardware, tensor, pipeline) * efficiency.link
    return RooflineCost(
        token_s=2 * shape.layer_parameters / flops,
        pair_s=shape.attention_flops_per_pair / flops,
        row_s=2 * shape.head_parameters / flops,
        weights_s=weights * shape.element_bytes / (tensor * hardware.memory_byte_s * efficiency.memory),
        context_s=context_seconds(shape, hardware, tensor, efficiency),
        fixed_s=shape.layers * efficiency.layer_s + sums * efficiency.sum_s + hops * efficiency.send_s,
        send_token_s=activation_bytes * (sums * 2 * (tensor - 1) / tensor / ring_byte_s + hops / hop_byte_s),
    )
