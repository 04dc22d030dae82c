"""Pulls between two processes on one device, as workers make them: probe, digests, conversion, and a changed byte."""

import asyncio
import multiprocessing as mp
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from kvtransfer.digest import combine, digest_cells
from kvtransfer.errors import DigestMismatch
from kvtransfer.layout import KVLayout
from kvtransfer.links import TransportSet
from kvtransfer.open import RESERVED_BLOCKS, open_transports
from kvtransfer.ticket import PeerAddress, Piece
from kvtransfer.transport import PullOrder, ReadStats
from workers.executor.kv_pool import KVPool, allocate_pool
from workers.ops.narrow import from_slots, to_slots

LARGE = KVLayout("8B", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")  # 2 MiB blocks
SMALL = replace(LARGE, num_layers=2, layers=(0, 2), head_dim=16)
ROUNDS = 5


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if other bytes arrive than those of the owner, or if a changed byte is not noticed."""
    return asyncio.run(_measure(device, tiny=tiny))


async def _measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    layout, num_blocks = (SMALL, 8) if tiny else (LARGE, 256)
    pipe, theirs = mp.get_context("spawn").Pipe()
    owner = mp.get_context("spawn").Process(target=_own, args=(theirs, str(device), layout, num_blocks), daemon=True)
    owner.start()
    figures: dict[str, object] = {}
    try:
        if not pipe.poll(60):
            raise TimeoutError("the owner did not start within 60 s")
        peer, order = pipe.recv()
        truth = _truth(layout, num_blocks, device)
        larger = replace(layout, block_size=2 * layout.block_size)
        for name, ours, staging_mib in (
            ("same", layout, 64),
            ("larger_blocks", larger, 64),
            ("larger_blocks_staged_in_512_mib", larger, 64 if tiny else 512),
            ("int8", replace(larger, dtype="int8"), 64),
            ("int8_staged_in_512_mib", replace(larger, dtype="int8"), 64 if tiny else 512),
        ):
            reader = _Reader(ours, ours.blocks_for(order.num_tokens), device, staging_mib << 20)
            figures |= {f"{name}_{key}": value for key, value in (await _pulled(peer, order, reader, truth)).items()}
        pipe.send("change a byte")
        pipe.recv()
        reader = _Reader(layout, num_blocks, device)
        await reader.transports.connect(peer)
        try:
            await reader.pull(order)
        except DigestMismatch:
            figures["changed_byte"] = "noticed"
        else:
            raise AssertionError("a changed byte was not noticed")
        finally:
            await reader.transports.close()
    finally:
        owner.kill()
        owner.join()
    return figures


async def _pulled(peer: PeerAddress, order: PullOrder, reader: "_Reader", truth: Tensor) -> dict[str, object]:
    """Pull all blocks into the reader's pool; times with digests and without."""
    ours = reader.pool.region.layout
    try:
        report = await reader.transports.connect(peer)
        await reader.pull(order)
        if not torch.equal(reader.arrived().view(torch.uint8), _expected(truth, ours).view(torch.uint8)):
            raise AssertionError(f"other bytes arrived in {ours.dtype} blocks of {ours.block_size}")
        plain, checked = [
            statistics.median([await reader.seconds(each) for _ in range(ROUNDS)])
            for each in (replace(order, digests=()), order)
        ]
        stats = await reader.pull(order)
    finally:
        await reader.transports.close()
    return {
        "transport": report.transport,
        "latency_us": report.latency_s * 1e6,
        "plain_gb_s": stats.num_bytes / plain / 1e9,
        "checked_gb_s": stats.num_bytes / checked / 1e9,
        "digests": stats.num_digests,
        "check_ms": stats.digest_seconds * 1e3,
    }


class _Reader:
    """A pool whose blocks are filled from the last to the first."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, staging_bytes: int = 0) -> None:
        self.pool = allocate_pool(layout, num_blocks + RESERVED_BLOCKS, device, staging_bytes=staging_bytes)
        self.transports = _open(self.pool, "reader")
        self.blocks = tuple(range(RESERVED_BLOCKS + num_blocks - 1, RESERVED_BLOCKS - 1, -1))

    async def pull(self, order: PullOrder) -> ReadStats:
        read = self.transports.pull(replace(order, target_blocks=self.blocks))
        try:
            return await read.done
        finally:
            await read.settled

    async def seconds(self, order: PullOrder) -> float:
        begun = time.perf_counter()
        await self.pull(order)
        return time.perf_counter() - begun

    def arrived(self) -> Tensor:
        return self.pool.blocks[RESERVED_BLOCKS:].flip(0)


def _open(pool: KVPool, incarnation: str) -> TransportSet:
    backends = ("tcp",) if pool.region.device == "cpu" else ("cuda_ipc",)
    secret = b"the secret of the benchmark"
    return open_transports(
        pool.region, backends, incarnation=incarnation, secret=secret, host="127.0.0.1", place=pool.place
    )


def _own(pipe: Connection, device: str, layout: KVLayout, num_blocks: int) -> None:
    """Send the address and a pull of all blocks; change a byte of the last block when asked."""
    pool = allocate_pool(layout, num_blocks + RESERVED_BLOCKS, torch.device(device))
    pool.blocks[RESERVED_BLOCKS:] = _truth(layout, num_blocks, pool.blocks.device)
    transports = _open(pool, "owner")
    blocks, piece = tuple(range(RESERVED_BLOCKS, RESERVED_BLOCKS + num_blocks)), Piece(0, layout.heads, layout.layers)
    digests = combine(digest_cells(pool.region, [(block, layout.block_size) for block in blocks]), layout, piece)
    order = PullOrder("owner", blocks, (), 0, num_blocks * layout.block_size, ((piece, digests),), 20.0)
    pipe.send((PeerAddress("owner", "owner", "127.0.0.1", 0, (transports.shard(),)), order))
    pipe.recv()
    pool.memory[pool.region.pool_bytes - 1] ^= 1
    if pool.memory.is_cuda:
        torch.cuda.synchronize()
    pipe.send("changed")
    pipe.poll(None)


def _truth(layout: KVLayout, num_blocks: int, device: torch.device) -> Tensor:
    """[block, kv_head, layer, k|v, slot, slot_size]: the same in both processes."""
    generator = torch.Generator(device).manual_seed(0)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return torch.randn((num_blocks, *layout.shape), dtype=dtype, device=device, generator=generator)


def _expected(truth: Tensor, ours: KVLayout) -> Tensor:
    """The truth in blocks of another layout, whose size is a multiple."""
    times = ours.block_size // truth.shape[4]
    blocks = truth.view(-1, times, *truth.shape[1:]).movedim(1, 4).flatten(4, 5)
    return blocks if ours.dtype != "int8" else to_slots(from_slots(blocks, torch.float32), torch.int8)
