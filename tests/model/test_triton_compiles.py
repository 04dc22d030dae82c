"""Attention and fused operations compile for an H200, which needs no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import re
from dataclasses import replace
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.ops import triton_delta, triton_fused, triton_lora, triton_paged
from workers.ops.triton_paged import CHUNK, DECODE, INVARIANT, SPLIT

POINTERS = {"query", "output", "states", "pool"}
STRIDES = {"query_token_stride", "query_head_stride"}

def ptx(kernel, tile, kinds, sizes, aligned):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in aligned}
    source = ASTSource(kernel, signature, {name: sizes[name] for name in names if name in sizes}, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

for pool, slot in (("*bf16", 128), ("*i8", 132), ("*fp8e4nv", 132)):
    kinds = {"query": "*bf16", "output": "*bf16", "pool": pool, "states": "*fp32", "scale": "fp32", "softcap": "fp32"}
    kinds["sinks"] = "*bf16"
    kinds |= dict.fromkeys(("query_starts", "context_lens", "block_tables"), "*i32")
    window = -8192 if slot == 132 else 0
    sizes = {"LAYERS": 32, "KV_HEADS": 8, "BLOCK": 16, "SLOT": slot, "HEAD_DIM": 128, "WINDOW": window, "GROUP": 4,
             "DIM": 128, "CAPPED": False, "SCALED": slot == 132, "SPLIT": SPLIT, "SINKS": True}
    for kernel, tile, whole in (
        (triton_paged._attend_span, DECODE, True), (triton_paged._attend_chunk, DECODE, True),
        (triton_paged._attend_chunk, CHUNK, True),
        (triton_paged._attend_span, INVARIANT, False), (triton_paged._attend_chunk, INVARIANT, False),
    ):
        own = sizes | {"ROWS": tile.rows, "KEYS": tile.keys, "QUERIES": tile.rows // 4, "WHOLE": whole}
        own = {name: value for name, value in own.items() if name in kernel.arg_names}
        found = ptx(kernel, tile, kinds, own, POINTERS | STRIDES)
        copies = re.findall(r"cp[.]async[.]c[ag][.]shared[.]global [^;]*, (0x[0-9a-f]+)", found)
        widths = {int(width, 16) for width in copies}
        assert 16 in widths if pool == "*bf16" else widths <= {4}, (kernel.__name__, pool, widths)
        assert "wgmma" in found or tile is DECODE
    own = {name: sizes[name] for name in ("HEAD_DIM", "WINDOW", "SPLIT", "DIM", "SINKS")}
    ptx(triton_paged._merge_spans, DECODE, kinds, own, POINTERS)

kinds = dict.fromkeys(("x", "delta", "weight", "total", "y", "gate_up", "cos", "sin"), "*bf16") | {"eps": "fp32"}
for added in (True, False):
    ptx(triton_fused._rms_norm, replace(DECODE, warps=16), kinds, {"SIZE": 4096, "ADDED": added, "WEIGHTED": True}, ())
for kind in range(3):
    ptx(triton_fused._gated, DECODE, kinds, {"COLUMNS": 1024, "KIND": kind}, ())
kinds |= {"entries": "*i64", "inner": "*fp32"} | dict.fromkeys(("rows", "tiles"), "*i32")
for kernel, size in ((triton_lora._shrink, {"DEPTH": 64}), (triton_lora._expand, {"COLUMNS": 64})):
    ptx(kernel, DECODE, kinds, {"HEIGHT": 16, "STRIDE": 5} | size, ())
numbers = ("mixed", "weight", "output", "states", "query", "key", "value", "a", "b", "rate", "bias")
delta = dict.fromkeys(numbers, "*fp32") | dict.fromkeys(("starts", "contexts", "tables"), "*i32")
ptx(triton_delta._conv, DECODE, delta, {"CHANNELS": 256, "TAPS": 4}, ())
ptx(triton_delta._rule, DECODE, delta, {"KEYS": 128, "FEATURES": 32}, ())
for dtype in ("*bf16", "*fp16", "*fp32"):
    kinds |= dict.fromkeys(("x", "norm", "cos", "sin", "y", "pool"), dtype) | {"slots": "*i64"}
    heads = {"GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": 128, "LAYERS": 32, "BLOCK": 16, "ROWS": 8}
    heads |= {"ROTATED": True, "WRITES": True, "HALF": 64, "DIM": 64, "REST": 1}
    for normed in (True, False):
        norms = {"NORMED": normed, "NORMED_AFTER": normed}
        ptx(triton_fused._rotate, DECODE, kinds, heads | norms, ("x", "y", "pool", "token_stride"))
"""


@pytest.mark.full
def test_attention_and_fused_operations_compile_for_a_gpu() -> None:
    """Quantized slots begin at any multiple of 4 bytes: a wider load would fail on the device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=250)
    assert made.returncode == 0, made.stderr[-3000:]
