"""The parts. Each module has `measure(device, *, tiny) -> dict[str, object]`: figures with units in their names.

It raises if something is wrong. `tiny` chooses sizes for a CPU, which prove the part itself; its figures mean nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GPUPart:
    """`alone`: no other part may use the device at the same time, since it measures."""

    name: str
    limit_s: float
    alone: bool = True


PARTS = (
    GPUPart("attention", 200, alone=False),
    GPUPart("deterministic", 150, alone=False),
    GPUPart("fused", 60, alone=False),
    GPUPart("models", 180, alone=False),
    GPUPart("adapters", 120, alone=False),
    GPUPart("split", 210),
    GPUPart("first_requests", 240),
    GPUPart("graph_memory", 90),
    GPUPart("limits", 30),
    GPUPart("decode", 60),
    GPUPart("ahead", 150),
    GPUPart("kernels", 60),
    GPUPart("prefill", 60),
    GPUPart("peers", 60),
    GPUPart("digests", 60),
    GPUPart("handoff", 60),
    GPUPart("checked_pull", 60),
    GPUPart("gap", 240),
    GPUPart("host_tier", 60),
    GPUPart("sampling", 60),
)
