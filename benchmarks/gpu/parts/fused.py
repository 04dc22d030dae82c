"""The fused operations against torch in float64, with their bandwidth as a share of a copy's."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import copy_bytes_s, graph_seconds_of
from workers.ops import triton_fused
from workers.ops.attention import REFERENCE
from workers.ops.batch import Heads
from workers.ops.fused import rotate_and_write


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    rows, size, ffn = (3, 64, 96) if tiny else (2048, 4096, 14336)
    dtype = torch.float32 if tiny else torch.bfloat16
    x, delta = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
    weight, gate_up = torch.randn(size, device=device).to(dtype), torch.randn(rows, 2 * ffn, device=device).to(dtype)
    heads, cos = (torch.randn(rows, *each, device=device).to(dtype) for each in ((40, 128), (1, 64)))
    total, normed = triton_fused.add_rms_norm(x, delta, weight, 1e-5)
    if not torch.equal(total, x + delta):
        raise AssertionError("add_rms_norm adds otherwise than torch")
    _near("add_rms_norm", normed, F.rms_norm(total.double(), (size,), weight.double(), 1e-5))
    _near("rms_norm", triton_fused.rms_norm(x, None, 1e-5), F.rms_norm(x.double(), (size,), None, 1e-5))
    gate, up = gate_up.double().chunk(2, -1)
    _near("silu", triton_fused.gated(gate_up, 0), F.silu(gate) * up)
    _near("gelu", triton_fused.gated(gate_up, 1), F.gelu(gate, approximate="tanh") * up)
    low, high = heads.double().chunk(2, -1)
    rotated = torch.cat([low * cos - high * cos, high * cos + low * cos], -1)
    _near("rotate", triton_fused.rotate(heads, cos, cos), rotated)
    # As Llama 3.1 8B has it, and with norms; a pool of four layers.
    qkv = torch.randn(rows, 48, 128, device=device).to(dtype)
    blocks = -(-rows // 16)
    pool = torch.zeros(blocks, 8, 4, 2, 16, 128, device=device, dtype=dtype)
    slots = torch.randperm(blocks * 16, device=device)[:rows]
    plain = Heads((cos, cos))
    for heads_of, name in ((plain, "rotate_and_write"), (Heads((cos, cos), qkv[0, :40], True, 1e-5), "with norms")):
        theirs, exact = torch.zeros_like(pool, dtype=torch.float64, device="cpu"), qkv.double().cpu()
        turned = replace(heads_of, rotation=(cos.double().cpu(),) * 2)
        turned = replace(turned, norm=None if heads_of.norm is None else heads_of.norm.double().cpu())
        wanted = rotate_and_write(exact, turned, theirs, 1, slots.cpu(), REFERENCE.write_kv)
        _near(name, triton_fused.rotate_and_write(qkv, heads_of, pool, 1, slots).cpu(), wanted)
        _near(f"{name}, pool", pool.cpu(), theirs)
    copy = copy_bytes_s(device, 1 << (16 if tiny else 32))
    calls = {
        "add_rms_norm": (lambda: triton_fused.add_rms_norm(x, delta, weight, 1e-5), 4 * x.nbytes),
        "gated": (lambda: triton_fused.gated(gate_up, 0), gate_up.nbytes * 3 // 2),
        "rotate": (lambda: triton_fused.rotate(heads, cos, cos), 2 * heads.nbytes),
        "rotate_and_write": (lambda: triton_fused.rotate_and_write(qkv, plain, pool, 1, slots), 2 * qkv.nbytes),
    }
    figures: dict[str, object] = {"copy_gb_s": copy / 1e9}
    for name, (call, num_bytes) in calls.items():
        figures[f"{name}_share_of_copy"] = num_bytes / graph_seconds_of(call, device) / copy
    # The launches of a layer of a decode of one sequence.
    decode = {
        "add_rms_norm": lambda: triton_fused.add_rms_norm(x[:1], delta[:1], weight, 1e-5),
        "gated": lambda: triton_fused.gated(gate_up[:1], 0),
        "rotate_and_write": lambda: triton_fused.rotate_and_write(qkv[:1], plain, pool, 1, slots[:1]),
    }
    figures |= {f"{name}_one_row_us": 1e6 * graph_seconds_of(call, device) for name, call in decode.items()}
    return figures


def _near(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.double() - wanted).norm() / wanted.norm())
    if not error < 1e-2:
        raise AssertionError(f"{name}: error {error:.2g}")
