"""Compiles for an H100 or H200 what the wrappers of Triton's kernels launch; nothing is launched, so no GPU is needed.

    python -m tests.model.compiled_kernels [--all]    prints what each variant takes of a multiprocessor, as JSON lines

Triton tells variants apart by the dtypes of tensors, and by numbers and addresses that are 1 or multiples of 16, so the
wrappers are called with tensors of a CPU. Run without TRITON_INTERPRET.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvtransfer.backends import device_copies
from kvtransfer.layout import LATENT_ORDER, ORDER, KVLayout
from kvtransfer.ticket import Piece
from workers.ops import (
    triton_delta,
    triton_digest,
    triton_filters,
    triton_fused,
    triton_linear,
    triton_lora,
    triton_paged,
    triton_sampling,
)
from workers.ops.batch import Heads, RaggedBatch, Scoring
from workers.ops.narrow import to_slots

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYERS, SIZE = 3, 16  # of a pool: layers, tokens of a block


class Hopper:
    """A driver of Triton that compiles for compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Variant:
    """`copies`: widths in bytes of asynchronous copies to shared memory. `stack_bytes`: of a thread, for spills.
    `fused`: the number of multiply-adds of float32, and whether ptxas may make more of them.
    """

    case: str
    kernel: str
    warps: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    copies: tuple[int, ...]
    has_wgmma: bool
    fused: tuple[int, bool]


def compiled(cases: Iterator[str]) -> Iterator[Variant]:
    """The variants that each case launches; a case launches them before it yields its name."""
    triton.runtime.driver.set_active(Hopper())
    launched: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found = run(kernel, *arguments, grid=grid, warmup=True, **options)
        launched.setdefault(id(found), found)
        return found

    JITFunction.run = compile_only
    seen: set[int] = set()
    try:
        for case in cases:
            for each in launched.keys() - seen:
                yield _variant(case, launched[each])
            seen |= launched.keys()
    finally:
        JITFunction.run = run


def _variant(case: str, kernel: Any) -> Variant:
    ptx = kernel.asm["ptx"]
    copies = re.findall(r"cp[.]async[.]c[ag][.]shared[.]global [^;]*, (0x[0-9a-f]+)", ptx)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(folder / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    metadata = kernel.metadata
    return Variant(
        case, kernel.name, metadata.num_warps, metadata.shared, int(numbers["REG"]), int(numbers["STACK"]),
        tuple(sorted({int(width, 16) for width in copies})), "wgmma" in ptx,
        (ptx.count("fma.rn.f32"), metadata.enable_fp_fusion),
    )  # fmt: skip


def cases(*, all_shapes: bool) -> Iterator[str]:
    yield from _attention(all_shapes=all_shapes)
    yield from _between_products(all_shapes=all_shapes)
    yield from _products(all_shapes=all_shapes)
    yield from _sampling(all_shapes=all_shapes)
    yield from _bytes_of_kv()


HEADS = (  # kv_heads, group, head_dim
    *((8, 4, 128), (2, 7, 64), (1, 8, 256), (3, 1, 40), (8, 8, 64), (8, 5, 128)),
    *((2, 16, 128), (1, 64, 64), (8, 2, 256), (4, 3, 96), (1, 1, 512), (32, 1, 80)),
)
POOLS = (BF16, FP32, FP16, torch.int8, torch.float8_e4m3fn)


def _attention(*, all_shapes: bool) -> Iterator[str]:
    """Decodes and a chunk; many decodes, whose spans are long; windows, soft caps and sinks."""
    some = [(HEADS[0], each, True) for each in POOLS] + [(HEADS[0], BF16, False), (HEADS[2], BF16, False)]
    every = list(itertools.product(HEADS, POOLS, (True, False)))
    for (kv_heads, group, dim), pool_dtype, plain in every if all_shapes else some:
        dtype = pool_dtype if pool_dtype in (BF16, FP16, FP32) else BF16
        pool = to_slots(torch.zeros(3, kv_heads, LAYERS, 2, SIZE, dim), pool_dtype)
        key, value = torch.zeros(2, 5, kv_heads, dim, dtype=dtype)
        triton_paged.write_kv(pool, key, value, 1, torch.zeros(5, dtype=torch.int64))
        window, sinks = (
            (0, None) if plain else (-8192 if dim == 128 else 100, torch.zeros(kv_heads * group, dtype=dtype))
        )
        scoring = Scoring(dim**-0.5, window, 0.0 if plain else 30.0, sinks)
        name = f"{pool_dtype} KV, {kv_heads} x {group} heads of {dim}, {'plain' if plain else 'window, cap, sinks'}"
        few, many = (torch.zeros(rows + 40, kv_heads * group, dim, dtype=dtype) for rows in (3, 400))
        triton_paged.attend(few, pool, 1, _batch(3, 700), scoring)
        triton_paged.attend(many, pool, 1, _batch(400, 2 * triton_paged.LONG_SPLIT), scoring)
        triton_paged.attend(many, pool, 1, _batch(400, 700), scoring)
        yield name
        triton_paged.attend(few, pool, 1, _batch(3, 700), scoring, invariant=True)
        yield f"invariant, {name}"


def _batch(decodes: int, context: int) -> RaggedBatch:
    """Decodes and a chunk of 40 tokens."""
    starts = torch.arange(decodes + 2, dtype=torch.int32)
    tables = torch.zeros(decodes + 1, -(-context // SIZE), dtype=torch.int32)
    contexts = torch.full((decodes + 1,), context, dtype=torch.int32)
    return RaggedBatch(starts, contexts, tables, torch.zeros(decodes + 40, dtype=torch.int64), 40, context, decodes)


def _between_products(*, all_shapes: bool) -> Iterator[str]:
    for dtype in (BF16, FP16, FP32):
        for size in (576, 4096, 16384) if all_shapes else (4096,):
            x = torch.zeros(3, size, dtype=dtype)
            triton_fused.rms_norm(x, x[0], 1e-5)
            triton_fused.rms_norm(x, None, 1e-5)
            triton_fused.add_rms_norm(x, x, x[0], 1e-5)
            for kind in range(3):
                triton_fused.gated(x, kind)
            yield f"norms and gates of {size}, {dtype}"
        for (kv_heads, group, dim), normed in itertools.product(HEADS if all_shapes else HEADS[:1], (True, False)):
            qkv = torch.zeros(5, kv_heads * (group + 2), dim, dtype=dtype)
            angles = torch.zeros(5, 1, dim // (2 if normed else 4), dtype=dtype)
            norm = torch.zeros(kv_heads * (group + 1), dim, dtype=dtype) if normed else None
            pool = torch.zeros(3, kv_heads, LAYERS, 2, SIZE, dim, dtype=dtype)
            slots = torch.zeros(5, dtype=torch.int64)
            for after in (False, True):
                heads = Heads((angles, angles), norm, after, 1e-5)
                triton_fused.rotate_and_write(qkv, heads, pool, 1, slots)
            triton_fused.rotate_and_write(qkv, Heads(None, norm), pool, 1, slots)
            triton_fused.rotate(qkv, angles, angles)
            yield f"rotation, {kv_heads} x {group} heads of {dim}, {dtype}"


def _products(*, all_shapes: bool) -> Iterator[str]:
    products = ((1, 4096, 4096), (300, 4096, 14336), (5, 6144, 576), (65, 1000, 100))[: 4 if all_shapes else 2]
    for dtype, (rows, out, size), biased in itertools.product((BF16, FP16, FP32), products, (True, False)):
        weight = torch.empty(out, size, dtype=dtype)
        triton_linear.linear(torch.empty(rows, size, dtype=dtype), weight, weight.new_empty(out) if biased else None)
        yield f"{rows} rows by {out} x {size}, {dtype}"
    for dtype, size in itertools.product((BF16, FP16, FP32), (4096, 100) if all_shapes else (4096,)):
        x, tiles = torch.zeros(3, size, dtype=dtype), torch.zeros(1, 3, dtype=torch.int32)
        entries = torch.zeros(1, 2, triton_lora.FIELDS, dtype=torch.int64)
        triton_lora.add(x, x.clone(), torch.zeros(3, dtype=torch.int32), tiles, entries, (20, size))
        yield f"adapters of {size}, {dtype}"
    heads, key_heads, dim = 4, 2, 128
    state = torch.zeros(3, 2, 2 * dim * dim)
    for channels in (640, 100):
        mixed, weight = torch.zeros(5, 2, channels), torch.zeros(2, 4, channels)
        triton_delta.causal_conv(mixed, weight, torch.zeros(3, 2, 3 * channels), _batch(2, 40), SIZE)
    value, key = torch.zeros(5, heads, dim), torch.zeros(5, key_heads, dim)
    gate, rate = torch.zeros(5, heads), torch.zeros(heads)
    triton_delta.gated_delta_rule(key, key, value, gate, gate, rate, rate, state, _batch(2, 40), SIZE)
    yield "delta rule"


def _sampling(*, all_shapes: bool) -> Iterator[str]:
    sizes = ((7, 128256), (1, 49152), (7, 151))[: 3 if all_shapes else 1]
    for dtype, (rows, vocab_size) in itertools.product((BF16, FP16, FP32), sizes):
        scores = torch.empty(rows, vocab_size, dtype=dtype)
        keys, bounds = torch.zeros(3, rows, dtype=torch.int64), torch.zeros(3, rows, dtype=torch.float64)
        summary = triton_sampling.summarize(scores)
        triton_sampling.choose(scores, summary, keys)
        triton_sampling.choose(scores, summary, keys, bounds[:2])
        triton_filters.filter_bounds(scores, summary.largest, keys, bounds)
        yield f"sampling of {rows} rows of {vocab_size}, {dtype}"


def _bytes_of_kv() -> Iterator[str]:
    shapes = (
        ("bfloat16", 128, ORDER),
        ("int8", 128, ORDER),
        ("fp8", 64, ORDER),
        ("bfloat16", 41, LATENT_ORDER),
        ("int8", 41, ORDER),
    )
    for dtype, dim, order in shapes:
        layout = KVLayout("m", LAYERS, 2, dim, SIZE, dtype, order=order)
        memory, rows = torch.zeros(3 * layout.block_bytes, dtype=torch.uint8), [[(1, 0, SIZE)]]
        table, _ = triton_digest.table_of(layout, rows)
        digests = torch.empty(1, 2, LAYERS, dtype=torch.int64)
        triton_digest.launch(memory, table, digests, layout, Piece(0, layout.heads, layout.layers))
        yield f"digests of {order}, {dim}, {dtype}"
    memory = torch.zeros(4096, dtype=torch.uint8)
    for width in (16, 4, 1):
        copies = np.array([[0, 1024, 64 + width]] * 9)
        address = memory.data_ptr() // 16 * 16
        device_copies.copy_ranges(address, address, copies, torch.from_numpy(copies))
        yield f"copies aligned to {width}"


def main() -> None:
    for each in compiled(cases(all_shapes="--all" in sys.argv[1:])):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
