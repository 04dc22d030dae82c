"""What queueing theory and arithmetic say without a simulation: the answers that a simulator has to agree with.

Prefills in an M/D/1 queue: Zhong et al., DistServe (OSDI'24), section 3.1. Recompute or transfer: Qin et al., Mooncake
(FAST'25), equation 2. Rates are per second, times in seconds.
"""

import math

from workers.profiles.profile_errors import ProfileError
from workers.profiles.shapes import ModelShape


def _load(rate: float, prefill_s: float, most: float) -> float:
    if not (0.0 <= rate < math.inf and 0.0 < prefill_s < math.inf):
        raise ProfileError(f"a rate of {rate}/s and a prefill of {prefill_s} s; they must be 0 or more, and above 0")
    if rate * prefill_s >= most:
        raise ProfileError(f"a load of {rate * prefill_s:.4g} has no bounded queue; it must be below {most:g}")
    return rate * prefill_s


def _positive(**figures: float) -> None:
    for name, value in figures.items():
        if not 0.0 < value < math.inf:
            raise ProfileError(f"{name} is {value}; it must be above 0, and finite")


def single_ttft_s(rate: float, prefill_s: float) -> float:
    """Mean TTFT of one device, Poisson arrivals, FCFS, all prompts of equal length, no batching: M/D/1."""
    load = _load(rate, prefill_s, 1.0)
    return prefill_s + rate * prefill_s**2 / (2 * (1 - load))


def two_stage_ttft_s(rate: float, prefill_s: float) -> float:
    """The same on a pipeline of two equal stages: the slower half is the queue."""
    load = _load(rate, prefill_s, 2.0)
    return prefill_s + rate * prefill_s**2 / (4 * (2 - load))


def tensor_ttft_s(rate: float, prefill_s: float, speedup: float) -> float:
    """The same on tensor ranks that together are `speedup` times as fast."""
    if not 1.0 <= speedup < math.inf:
        raise ProfileError(f"speedup is {speedup}; it must be 1 or more, and finite")
    return single_ttft_s(rate, prefill_s / speedup)


def replicas_ttft_s(rate: float, prefill_s: float, replicas: int) -> float:
    """The same on devices that each get an equal part of the requests, at random."""
    if replicas < 1:
        raise ProfileError(f"replicas is {replicas}; it must be 1 or more")
    return single_ttft_s(rate / replicas, prefill_s)


def crossover_load(speedup: float) -> float:
    """rate * prefill_s from which two stages answer sooner than two tensor ranks with this speed-up, 1 < speedup < 2.

    Below it tensor parallelism wins, by its shorter execution; above it the pipeline, by its shorter queue. With u the
    load, 1 + u/(4(2 - u)) = 1/K + u/(2K(K - u)) times 4K(2 - u)(K - u) is the quadratic that is solved here.
    """
    if not 1.0 < speedup < 2.0:
        raise ProfileError(f"speedup is {speedup}; two devices have a crossover only between 1 and 2")
    k = speedup
    a = 4 * (k - 1) - k + 2
    b = -4 * (k - 1) * (2 + k) + k * k - 4
    c = 8 * k * (k - 1)
    return (-b - math.sqrt(b * b - 4 * a * c)) / (2 * a)


def transfer_threshold_byte_s(
    hidden: int,
    query_heads_per_kv_head: float,
    prefix_tokens: int,
    flops: float,
    pair_factor: float = 4.0,
    token_factor: float = 22.0,
    element_bytes: int = 2,
) -> float:
    """Bytes/s of a link above which fetching a prefix's KV beats computing it: Mooncake's equation 2.

    A layer's FLOPs for n tokens are taken as pair_factor * n² * hidden + token_factor * n * hidden², in Mooncake's
    numbers for Llama-3-70B. `flops` is what all GPUs of the instance reach together.
    """
    _positive(hidden=hidden, query_heads_per_kv_head=query_heads_per_kv_head, flops=flops)
    reuse = query_heads_per_kv_head * (pair_factor * prefix_tokens * hidden + token_factor * hidden**2)
    return flops * 2 * hidden * element_bytes / reuse


def break_even_byte_s(shape: ModelShape, prefix_tokens: int, flops: float) -> float:
    """The same from a model's shape: KV bytes of the prefix over the seconds that computing it takes."""
    _positive(prefix_tokens=prefix_tokens, flops=flops)
    return shape.kv_bytes_per_token * prefix_tokens * flops / shape.prefill_flops(prefix_tokens)


def sustained_byte_s(shape: ModelShape, rate: float, mean_prompt_tokens: float) -> float:
    """Bytes of KV that `rate` requests/s send from prefill to decode workers."""
    return rate * mean_prompt_tokens * shape.kv_bytes_per_token


def exposed_transfer_s(
    kv_bytes: float, prefill_s: float, layers: int, link_byte_s: float, latency_s: float = 0.0
) -> float:
    """What of a transfer remains after the prefill when each layer is sent as soon as it is computed.

    The last layer's KV is never hidden; of the others, what the link does not get through meanwhile.
    """
    _positive(layers=layers, link_byte_s=link_byte_s)
    whole_s = kv_bytes / link_byte_s
    return latency_s + max(whole_s / layers, whole_s - prefill_s * (layers - 1) / layers)
