"""The probe block: a block with known content that a reader fetches before it uses a path.

    block 0   stamped by its owner with a pattern that follows from the rank's name; never used for KV
    block 1   scratch, the only block that a probe writes; never used for KV

So a probe proves that the bytes came from this rank's memory, not only that a call succeeded. The two blocks may have
different sizes: a shorter pattern is the beginning of a longer one.
"""

import hashlib
import statistics

import numpy as np

from diptych.clock import now_s
from kvtransfer.errors import DigestMismatch
from kvtransfer.transport import Copies, Read, ReadStats, Region, Transport

PROBE_BLOCK = 0
SCRATCH_BLOCK = 1
RESERVED_BLOCKS = 2

LATENCY_BYTES = 64
ROUNDS = 5
BANDWIDTH_BYTES = 8 << 20  # enough to hide the fixed cost, small enough not to disturb traffic


def probe_pattern(name: str, num_bytes: int) -> bytes:
    """The first bytes of block 0 of the pool that the rank `name` owns."""
    return hashlib.shake_128(b"diptych probe block " + name.encode()).digest(num_bytes)


def stamp_probe_block(region: Region, name: str) -> None:
    """Write the pattern into block 0 of this rank's pool."""
    size = region.layout.block_bytes
    if region.num_blocks <= RESERVED_BLOCKS:
        raise ValueError(f"a pool of {region.num_blocks} blocks has no room beside its {RESERVED_BLOCKS} reserved ones")
    _store(region, PROBE_BLOCK * size, probe_pattern(name, size))


async def verify_probe(transport: Transport, region: Region, name: str, num_bytes: int, deadline_s: float) -> None:
    """Fetch as much of the rank's block 0 and compare it. Raises `DigestMismatch`, or what the read raised."""
    scratch = SCRATCH_BLOCK * region.layout.block_bytes
    _store(region, scratch, bytes(num_bytes))
    await finish(transport.read(name, _probe(region, num_bytes), deadline_s=deadline_s))
    if _load(region, scratch, num_bytes) != probe_pattern(name, num_bytes):
        raise DigestMismatch(f"the probe block of {name} arrived with other bytes than its owner must hold")


async def measure(
    transport: Transport, region: Region, name: str, num_bytes: int, deadline_s: float
) -> tuple[float, float]:
    """Seconds of a tiny read as the event loop sees it, and bytes per second of reads of `num_bytes`; medians of a few
    rounds. `num_bytes` is at most the smaller of the two blocks.
    """
    tiny = _probe(region, min(LATENCY_BYTES, num_bytes))
    large = _probe(region, num_bytes).repeat(max(1, min(64, BANDWIDTH_BYTES // num_bytes)), axis=0)
    latencies: list[float] = []
    bandwidths: list[float] = []
    for copies, samples in ((tiny, latencies), (large, bandwidths)):
        for _ in range(ROUNDS):
            begun = now_s()
            stats = await finish(transport.read(name, copies, deadline_s=deadline_s))
            elapsed_s = max(now_s() - begun, 1e-9)
            samples.append(elapsed_s if copies is tiny else stats.num_bytes / elapsed_s)
    latency_s, rate = statistics.median(latencies), statistics.median(bandwidths)
    moved = num_bytes * len(large)
    # The fixed cost is already in the latency. Where that is most of the time, it says little about the rate.
    moving_s = max(moved / rate - latency_s, moved / rate / 2)
    return latency_s, moved / moving_s


def _load(region: Region, offset: int, num_bytes: int) -> bytes:
    on_device = region.device_bytes
    return bytes(region.bytes(offset, num_bytes)) if on_device is None else on_device.load(offset, num_bytes)


def _store(region: Region, offset: int, data: bytes) -> None:
    if region.device_bytes is None:
        region.bytes(offset, len(data))[:] = data
    else:
        region.device_bytes.store(offset, data)


def _probe(region: Region, num_bytes: int) -> Copies:
    """From the owner's block 0, at any block size, into our scratch block."""
    return np.array([[PROBE_BLOCK, SCRATCH_BLOCK * region.layout.block_bytes, num_bytes]], np.int64)


async def finish(read: Read) -> ReadStats:
    """Await a read until it has settled, so that the scratch block is free again even after a failure."""
    try:
        return await read.done
    finally:
        await read.settled
