"""What the device can do at most: memory bandwidth, matrix products, and copies to and from pinned host memory."""

import torch

from benchmarks.gpu.timing import copy_bytes_s, matmul_flop_s, read_bytes_s, seconds_of


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    scale = 1 << (16 if tiny else 32)
    figures: dict[str, object] = {
        "copy_gb_s": copy_bytes_s(device, scale) / 1e9,
        "read_gb_s": read_bytes_s(device, scale) / 1e9,
        "matmul_tflop_s": matmul_flop_s(device, 64 if tiny else 8192) / 1e12,
    }
    host = torch.empty(scale >> 2, dtype=torch.uint8, pin_memory=device.type == "cuda")
    here = torch.empty_like(host, device=device)
    figures["to_host_gb_s"] = host.nbytes / seconds_of(lambda: host.copy_(here, non_blocking=True), device) / 1e9
    figures["from_host_gb_s"] = host.nbytes / seconds_of(lambda: here.copy_(host, non_blocking=True), device) / 1e9
    launch = torch.zeros(1, device=device)
    figures["launch_us"] = seconds_of(lambda: launch.add_(1), device) * 1e6
    return figures
