"""Step times from a model's shape and a GPU's data sheet, for hardware without measurements."""

from workers.costs import RooflineCost
from workers.profiles.hardware import Hardware
from workers.profiles.profile_errors import ProfileError
from workers.profiles.shapes import ModelShape

# The shares of a data sheet that a good engine reaches, and what a step costs besides.
COMPUTE = 0.75  # DistServe's prefills on A100 reach 0.77 to 0.81 at TP 1 and 2; Splitwise's tables less
MEMORY = 0.8  # DistServe's OPT-13B decode at TP 1
LINK = 0.65  # Vidur's all-reduce of 67 MB over 8 GPUs: 174 of 300 GB/s on A100, 365 of 450 on H100
LAYER_S = 0.1e-3  # kernel launches of a layer; what DistServe's decode at TP 1 leaves unexplained
ALL_REDUCE_S = 40e-6  # small all-reduces over 8 GPUs take 62 us on A100 and 37 us on H100 (Vidur)
SEND_S = 20e-6


def check_parallel(shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int) -> None:
    """Raises `ProfileError` for parallelism that no engine would run."""
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
    """Bytes/s between pipeline stages: within a node if the instance fits in one."""
    inside = tensor * pipeline <= hardware.gpus_per_node
    return hardware.node_link_byte_s if inside else hardware.cross_link_byte_s


def context_seconds(shape: ModelShape, hardware: Hardware, tensor: int) -> float:
    """Reading a token's KV in all layers. Ranks beyond the KV heads hold copies, which saves no time."""
    ranks = min(tensor, shape.kv_heads)
    return shape.context_bytes_per_token / (ranks * hardware.memory_byte_s * MEMORY)


def roofline(shape: ModelShape, hardware: Hardware, tensor: int, pipeline: int) -> RooflineCost:
    """Each layer has two all-reduces over the tensor ranks (a ring: each rank sends 2(T-1)/T of the activations), and
    each stage but the last one send. Raises `ProfileError`."""
    check_parallel(shape, hardware, tensor, pipeline)
    flops = hardware.flops_of(shape.element_bytes) * COMPUTE * tensor
    weights = shape.layer_parameters - shape.expert_parameters + shape.head_parameters
    number_s = shape.element_bytes / (tensor * hardware.memory_byte_s * MEMORY)  # to read one
    activation_bytes = shape.hidden * shape.element_bytes
    sums, hops = 2 * shape.layers * (tensor > 1), pipeline - 1
    ring_byte_s = hardware.node_link_byte_s * LINK
    hop_byte_s = stage_link_byte_s(hardware, tensor, pipeline) * LINK
    return RooflineCost(
        token_s=shape.token_flops / flops,
        pair_s=shape.attention_flops_per_pair / flops,
        row_s=2 * shape.head_parameters / flops,
        weights_s=weights * number_s,
        experts_s=shape.expert_parameters * number_s,
        expert_share=shape.experts.per_token / shape.experts.count if shape.experts else 0.0,
        context_s=context_seconds(shape, hardware, tensor),
        state_s=2 * shape.state_bytes / (min(tensor, shape.kv_heads) * hardware.memory_byte_s * MEMORY),
        fixed_s=shape.layers * LAYER_S + sums * ALL_REDUCE_S + hops * SEND_S,
        send_token_s=activation_bytes * (sums * 2 * (tensor - 1) / tensor / ring_byte_s + hops / hop_byte_s),
    )
