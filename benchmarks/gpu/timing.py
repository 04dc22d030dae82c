"""Device time of a call, and the device's limits, measured in the same run as what is compared with them."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds_of(call: Callable[[], object], device: torch.device, *, rounds: int = 5, min_s: float = 0.02) -> float:
    """The median over rounds of a call's seconds; a round repeats it for at least `min_s`."""
    call()
    _settle(device)
    once = max(_elapsed(call, device, 1), 1e-7)
    repeats = max(1, min(1000, int(min_s / once)))
    return statistics.median(_elapsed(call, device, repeats) / repeats for _ in range(rounds))


def graph_seconds_of(call: Callable[[], object], device: torch.device, *, rounds: int = 5) -> float:
    """As `seconds_of`, replayed as a CUDA graph of ten calls: without the host's time to launch."""
    if device.type != "cuda":
        return seconds_of(call, device, rounds=rounds)
    call()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return seconds_of(graph.replay, device, rounds=rounds) / 10


def kernel_seconds(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of each kernel of a call on a GPU, by name, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return {each.key: each.self_device_time_total / 1e6 for each in profiler.key_averages()}


def copy_bytes_s(device: torch.device, num_bytes: int = 4 << 30) -> float:
    """Bytes per second of a device-to-device copy, counting bytes read and written."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def read_bytes_s(device: torch.device, num_bytes: int = 4 << 30) -> float:
    """Bytes per second of a sum over a large tensor, which only reads."""
    source = torch.randn(num_bytes // 4, device=device)
    return num_bytes / seconds_of(lambda: source.sum(), device)


def matmul_flop_s(device: torch.device, size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Floating-point operations per second of a large matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, device)


def _elapsed(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
