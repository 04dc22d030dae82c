"""Digests of KV cells as one Triton kernel: the numbers of `kvtransfer.digest`, for memory on a GPU.

xxh3 of more than 240 bytes has eight accumulators. A stripe is 64 bytes, one word of 8 bytes for each of them. The 16
stripes of 1 KiB only add up, so a program takes them at once; each KiB needs the result of the one before. A program
computes one cell. Shorter cells, such as the first token of a small model's block, are digested on the host.

Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.digest import host_digests
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Span

SHORT_BYTES = tl.constexpr(240)  # xxh3 hashes up to so many in other ways
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
AVALANCHE = tl.constexpr(0x165667919E3779F9)
SECRET_WORDS = tl.constexpr(24)
CONSTANTS = tl.constexpr(32)  # words of the secret, and the first values of the accumulators

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_ACCUMULATORS = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
_CONSTANTS = np.concatenate([np.frombuffer(_SECRET, "<i8"), np.array(_ACCUMULATORS, np.uint64).view(np.int64)])
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def cell_digests(memory: Tensor, layout: KVLayout, box: Piece, rows: Sequence[Sequence[Span]]) -> Tensor:
    """[row, kv_head, layer] int64 on the device of `memory`: digests as `kvtransfer.digest.host_digests` makes them.

    `memory` [byte] begins with block 0 of `layout`, aligned to 8 bytes. Returns before the kernel has run.
    """
    heads, layers = box.heads[1] - box.heads[0], box.layers[1] - box.layers[0]
    digests = torch.empty((len(rows), heads, layers), dtype=torch.int64, device=memory.device)
    if not rows:
        return digests
    table, tokens = table_of(layout, rows)
    if memory.is_cuda:
        table = table.pin_memory().to(memory.device, non_blocking=True)
    launch(memory, table, digests, layout, box)
    for row in np.flatnonzero(layout.vectors * layout.slot_bytes * tokens <= SHORT_BYTES.value).tolist():
        digests[row] = _on_host(memory, layout, box, rows[row])
    return digests


def launch(memory: Tensor, table: Tensor, digests: Tensor, layout: KVLayout, box: Piece) -> None:
    """Fill `digests`, but for short cells; `table` is `table_of` its rows, on the device."""
    unit = _unit(layout)
    slot = layout.slot_bytes // unit
    _digest[digests.shape](
        memory[: len(memory) // unit * unit].view(_WORDS[unit]),
        table,
        digests,
        layout.heads[0],
        box.heads[0],
        layout.layers[0],
        box.layers[0],
        layout.shape[1],
        SLOT=slot,
        HALF=layout.block_size * slot,
        VECTORS=layout.vectors,
        UNIT=unit,
        num_warps=1,
    )


def table_of(layout: KVLayout, rows: Sequence[Sequence[Span]]) -> tuple[Tensor, NDArray[np.int64]]:
    """The kernel's table, and the tokens of each row.

    The table has the constants, where each row's slots begin and end, and each slot's place in its block's first cell.
    """
    block, slot = layout.block_bytes // _unit(layout), layout.slot_bytes // _unit(layout)
    flat = itertools.chain.from_iterable
    blocks, firsts, counts = np.fromiter(flat(flat(rows)), np.int64).reshape(-1, 3).T
    ends = counts.cumsum()
    row_ends = ends[np.fromiter(map(len, rows), np.int64, len(rows)).cumsum() - 1]
    places = np.repeat(blocks * block + (firsts - ends + counts) * slot, counts) + np.arange(ends[-1]) * slot
    header = len(_CONSTANTS) + len(rows) + 1
    table = np.concatenate([_CONSTANTS, [header], row_ends + header, places])
    return torch.from_numpy(table), np.diff(row_ends, prepend=0)


def _unit(layout: KVLayout) -> int:
    """Bytes of a load, which never crosses the end of a slot."""
    return math.gcd(layout.slot_bytes, 8)


def _on_host(memory: Tensor, layout: KVLayout, box: Piece, spans: Sequence[Span]) -> Tensor:
    """The digests of one row, whose blocks are copied to the host."""
    size = layout.block_bytes
    blocks = torch.cat([memory[block * size : (block + 1) * size] for block, _, _ in spans]).cpu().numpy()
    here = [(index, first, count) for index, (_, first, count) in enumerate(spans)]
    return torch.from_numpy(host_digests(memoryview(blocks.data), layout, box, [here])[0].view(np.int64))


@triton.jit
def _secret(table, word, seed):  # type: ignore[no-untyped-def]
    """Words of the secret for this seed."""
    value = tl.load(table + word).to(tl.uint64)
    return tl.where(word % 2 == 0, value + seed, value - seed)


@triton.jit
def _secret_at(table, byte, seed):  # type: ignore[no-untyped-def]
    """Words of the secret from bytes that are no multiples of 8."""
    low, high = _secret(table, byte // 8, seed), _secret(table, byte // 8 + 1, seed)
    shift = (byte % 8 * 8).to(tl.uint64)
    return (low >> shift) | (high << (64 - shift))


@triton.jit  # type: ignore[untyped-decorator]
def _load(cell, slots, unit, units, known, SLOT: tl.constexpr, HALF: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 8 bytes from each `unit` of a cell on; its K takes `units`, and its V follows, if it has one."""
    word = tl.zeros(unit.shape, tl.uint64)
    for part in tl.static_range(8 // UNIT):
        at = unit + part
        is_value = at >= units
        at = tl.where(is_value, at - units, at)
        place = tl.load(slots + at // SLOT, known, 0) + at % SLOT + tl.where(is_value, HALF, 0)
        value = tl.load(cell + place, known, 0).to(tl.uint64)
        if UNIT < 8:
            value = (value & ((1 << 8 * UNIT) - 1)) << (8 * UNIT * part)
        word = word | value
    return word


@triton.jit  # type: ignore[untyped-decorator]
def _added(accumulators, words, keys, known, STRIPES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the words of stripes to the accumulators: a word to its neighbor's, its product to its own."""
    mixed = words ^ keys
    products = tl.where(known, (mixed & 0xFFFFFFFF) * (mixed >> 32), 0)
    plain = tl.reshape(tl.sum(tl.reshape(words, [STRIPES, 8]), 0), [4, 2])
    neighbors = tl.reshape(tl.sum(plain, 1, keep_dims=True) - plain, [8])
    return accumulators + tl.sum(tl.reshape(products, [STRIPES, 8]), 0) + neighbors


# One kernel serves all boxes of a layout.
@triton.jit(do_not_specialize=["pool_head", "first_head", "pool_layer", "first_layer", "pool_layers"])  # type: ignore[untyped-decorator]
def _digest(  # type: ignore[no-untyped-def]
    memory,
    table,
    digests,
    pool_head,
    first_head,
    pool_layer,
    first_layer,
    pool_layers,
    SLOT: tl.constexpr,
    HALF: tl.constexpr,
    VECTORS: tl.constexpr,
    UNIT: tl.constexpr,
):
    row, head, layer = tl.program_id(0), first_head + tl.program_id(1), first_layer + tl.program_id(2)
    start = tl.load(table + CONSTANTS + row)
    units = ((tl.load(table + CONSTANTS + row + 1) - start) * SLOT).to(tl.int32)  # of each vector
    slots = table + start
    cell = memory + ((head - pool_head) * pool_layers + layer - pool_layer) * (VECTORS * HALF)
    length = VECTORS * units * UNIT
    if length > SHORT_BYTES:
        seed = (head.to(tl.uint64) << 32) | layer.to(tl.uint64)
        lane, word = tl.arange(0, 8), tl.arange(0, 128)  # of a stripe, and of 16 stripes
        keys = _secret(table, word // 8 + word % 8, seed)
        scramble = _secret(table, 16 + lane, seed)
        total = tl.load(table + SECRET_WORDS + lane).to(tl.uint64)
        stripes, full = (length - 1) // 64, (length - 1) // 1024
        for block in range(0, full + 1):
            nth = block * 128 + word
            known = nth // 8 < stripes
            words = _load(cell, slots, nth * (8 // UNIT), units, known, SLOT, HALF, UNIT)
            total = _added(total, words, keys, known, 16)
            scrambled = (total ^ (total >> 47) ^ scramble) * PRIME32_1
            total = tl.where(block < full, scrambled, total)
        last = VECTORS * units - 64 // UNIT + lane * (8 // UNIT)
        words = _load(cell, slots, last, units, lane >= 0, SLOT, HALF, UNIT)
        total = _added(total, words, _secret_at(table, 121 + lane * 8, seed), lane >= 0, 1)
        total = total ^ _secret_at(table, 11 + lane * 8, seed)
        pairs, odd = tl.reshape(total, [4, 2]), tl.arange(0, 2)[None, :]
        low, high = tl.sum(tl.where(odd == 0, pairs, 0), 1), tl.sum(tl.where(odd == 1, pairs, 0), 1)
        digest = length.to(tl.uint64) * PRIME64_1 + tl.sum((low * high) ^ tl.umulhi(low, high), 0)
        digest = (digest ^ (digest >> 37)) * AVALANCHE
        digest = digest ^ (digest >> 32)
        at = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        tl.store(digests + at, digest.to(tl.int64))
