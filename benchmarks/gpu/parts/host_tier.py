"""Swaps between the device and pinned host memory, and conversion of staged KV: exact, and their speed."""

import random
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.timing import seconds_of
from kvtransfer.layout import KVLayout
from workers.engine.step import StepPlan
from workers.executor.kv_pool import allocate_pool
from workers.ops.completion import wait
from workers.ops.narrow import to_slots, torch_dtype

LARGE = KVLayout("8B", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")  # 2 MiB blocks
SMALL = replace(LARGE, num_layers=2, layers=(0, 2), head_dim=16)
# The owner's dtype and block size, and ours.
CONVERSIONS = (
    ("bfloat16", 32, "bfloat16", 16),
    ("float32", 24, "bfloat16", 16),
    ("bfloat16", 16, "int8", 32),
    ("int8", 16, "bfloat16", 16),
    ("float16", 16, "fp8", 24),
)


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a block comes back with other bytes, or is converted to other bytes than on the host."""
    layout, num_blocks = (SMALL, 8) if tiny else (LARGE, 256)
    return _swaps(device, layout, num_blocks) | _conversions(device, layout, num_blocks // 8)


def _swaps(device: torch.device, layout: KVLayout, num_blocks: int) -> dict[str, object]:
    pool = allocate_pool(layout, num_blocks, device, num_blocks)
    if device.type == "cuda" and not pool.host.is_pinned():
        raise AssertionError("the host's blocks are not pinned")
    one_way = pool.host.nbytes / 1e9
    shuffled = random.Random(0).sample(range(num_blocks), num_blocks)
    figures: dict[str, object] = {
        "plain_out_gb_s": one_way / seconds_of(lambda: pool.host.copy_(pool.blocks, non_blocking=True), device),
        "plain_in_gb_s": one_way / seconds_of(lambda: pool.blocks.copy_(pool.host, non_blocking=True), device),
    }
    for name, order in (("adjacent", list(range(num_blocks))), ("scattered", shuffled)):
        pool.memory.random_(0, 256)
        before = pool.memory.clone()
        pairs = tuple(zip(range(num_blocks), order, strict=True))
        out = StepPlan(0, (), swap_out=pairs)
        back = StepPlan(0, (), swap_in=tuple((saved, block) for block, saved in pairs))
        pool.move(out)
        pool.memory.zero_()  # as the same step's chunks may do
        pool.move(back)
        wait(pool.record_event())
        if not torch.equal(pool.memory, before):
            raise AssertionError(f"{name}: blocks came back with other bytes")
        for way, plan in (("out", out), ("in", back)):
            rate = one_way / seconds_of(partial(pool.move, plan), device)
            figures[f"{name}_{way}_gb_s"] = rate
            figures[f"{name}_{way}_share"] = rate / float(str(figures[f"plain_{way}_gb_s"]))
    return figures


def _conversions(device: torch.device, layout: KVLayout, num_blocks: int) -> dict[str, object]:
    figures: dict[str, object] = {}
    for dtype, size, our_dtype, our_size in CONVERSIONS:
        owner = replace(layout, dtype=dtype, block_size=size)
        ours = replace(layout, dtype=our_dtype, block_size=our_size)
        numbers = torch.randn(num_blocks, *owner.shape[:-1], owner.head_dim)
        numbers[0, 0, 0, 0, 0, 0] = 1e5  # saturates float16
        staged = to_slots(numbers, torch_dtype(dtype)).view(torch.uint8).flatten()
        num_tokens = num_blocks * size - 3
        targets = tuple(range(ours.blocks_for(num_tokens + 5)))[::-1]

        pools = []
        for where in (torch.device("cpu"), device):
            pool = allocate_pool(ours, len(targets), where, staging_bytes=len(staged))
            pool.memory[pool.region.staging_offset :] = staged
            wait(pool.record_event())
            pool.place(pool.region.staging_offset, owner, targets, 5, num_tokens)
            pools.append(pool)
        expected, found = (pool.blocks.view(torch.uint8).cpu() for pool in pools)
        name = f"{dtype}_{size}_to_{our_dtype}_{our_size}"
        if not torch.equal(found, expected):
            raise AssertionError(
                f"{name}: {float((found != expected).float().mean()):.2g} of the bytes are not the host's"
            )
        pool.zero_blocks((0,))
        if pool.blocks[0].view(torch.uint8).any():
            raise AssertionError(f"{our_dtype}: a scrubbed block is not zero")
        place = partial(pool.place, pool.region.staging_offset, owner, targets, 5, num_tokens)
        figures[f"{name}_gb_s"] = staged.nbytes / seconds_of(place, device) / 1e9
    return figures
