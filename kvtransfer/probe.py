"""The probe block: real bytes that a reader fetches before it trusts a path.

    block 0   stamped by its owner with a pattern that follows from the owner's incarnation; never used for KV
    block 1   scratch, the only block that a probe writes; never used for KV

So a probe proves that the bytes came from this incarnation's memory, not only that a call succeeded.
"""

import asyncio
import hashlib
import statistics
from dataclasses import dataclass

from kvtransfer.digest import digest_blocks, digest_bytes
from kvtransfer.errors import DigestMismatch
from kvtransfer.transport import Copy, Read, ReadStats, Region, Transport

PROBE_BLOCK = 0
SCRATCH_BLOCK = 1
RESERVED_BLOCKS = 2

LATENCY_BYTES = 64
ROUNDS = 5
BANDWIDTH_BYTES = 8 << 20  # enough to see past the fixed cost, little enough not to disturb


@dataclass(frozen=True, slots=True)
class LinkQuality:
    latency_s: float
    bytes_per_s: float


def probe_pattern(incarnation: str, block_bytes: int) -> bytes:
    """The bytes of block 0 of the pool that `incarnation` owns."""
    return hashlib.shake_128(b"diptych probe block " + incarnation.encode()).digest(block_bytes)


def stamp_probe_block(region: Region, incarnation: str) -> None:
    """Write the pattern into our block 0. Do it again if anything ever wrote there."""
    size = region.layout.block_bytes
    if region.num_blocks <= RESERVED_BLOCKS:
        raise ValueError(f"a pool of {region.num_blocks} blocks has no room beside its {RESERVED_BLOCKS} reserved ones")
    region.bytes(PROBE_BLOCK * size, size)[:] = probe_pattern(incarnation, size)


async def verify_probe(transport: Transport, region: Region, incarnation: str, deadline_s: float) -> None:
    """Fetch the peer's block 0 and compare it. Raises `DigestMismatch`, or what the read raised."""
    size = region.layout.block_bytes
    region.bytes(SCRATCH_BLOCK * size, size)[:] = bytes(size)
    copy = Copy(PROBE_BLOCK * size, SCRATCH_BLOCK * size, size)
    await finish(transport.read(incarnation, (copy,), deadline_s=deadline_s))
    if digest_blocks(region, (SCRATCH_BLOCK,))[0] != digest_bytes(probe_pattern(incarnation, size)):
        raise DigestMismatch(f"the probe block of {incarnation} arrived with other bytes than its owner must hold")


async def measure(transport: Transport, region: Region, incarnation: str, deadline_s: float) -> LinkQuality:
    """Latency of a tiny read as the event loop sees it, and bandwidth of block-sized reads; medians of a few rounds."""
    size = region.layout.block_bytes
    loop = asyncio.get_running_loop()
    source, target = PROBE_BLOCK * size, SCRATCH_BLOCK * size
    tiny = (Copy(source, target, min(LATENCY_BYTES, size)),)
    large = (Copy(source, target, size),) * max(1, min(64, BANDWIDTH_BYTES // size))
    latencies: list[float] = []
    bandwidths: list[float] = []
    for copies, samples in ((tiny, latencies), (large, bandwidths)):
        for _ in range(ROUNDS):
            begun = loop.time()
            stats = await finish(transport.read(incarnation, copies, deadline_s=deadline_s))
            elapsed_s = max(loop.time() - begun, 1e-9)
            samples.append(elapsed_s if copies is tiny else stats.num_bytes / elapsed_s)
    latency_s, rate = statistics.median(latencies), statistics.median(bandwidths)
    num_bytes = size * len(large)
    moving_s = max(num_bytes / rate - latency_s, num_bytes / rate / 10)  # the fixed cost is already in the latency
    return LinkQuality(latency_s=latency_s, bytes_per_s=num_bytes / moving_s)


async def finish(read: Read) -> ReadStats:
    """Await a read and then its settling, so that the scratch block is free again even after a failure."""
    try:
        return await read.done
    finally:
        await read.settled
