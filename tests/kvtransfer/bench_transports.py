"""How fast the transports read from a second process, beside a plain copy in memory.

    python -m tests.kvtransfer.bench_transports

Medians of 9 rounds, owner and reader on one host, 64 KiB blocks, digests unchecked; the digest line is the check
itself. 2026-11, a shared virtual machine with 2 cores, NIXL 1.5.1 on UCX 1.23, GB/s contiguous | scattered:

                    1 MiB         16 MiB        64 MiB
    memory       8.95 | 8.06   6.92 | 5.62   8.03 | 5.87
    nixl (CMA)   3.17 | 2.59   1.77 | 1.36   2.37 | 1.39
    tcp          0.85 | 0.72   1.33 | 1.15   1.70 | 1.74
    digest       8.64 GB/s on one core
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable

from kvtransfer.digest import digest_blocks
from kvtransfer.layout import KVLayout
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import PeerAddress
from kvtransfer.transport import Copy, Transport
from tests.kvtransfer.peers import address_of, make_region, open_set, start_owner, whole_blocks

BLOCK_64K = KVLayout("bench", num_layers=8, num_kv_heads=2, head_dim=32, block_size=16)  # 64 KiB
NUM_BLOCKS = 2048
ROUNDS = 9


def scattered(count: int) -> tuple[Copy, ...]:
    blocks = random.Random(0).sample(range(2, NUM_BLOCKS), count)
    return whole_blocks(*zip(blocks, sorted(blocks), strict=True), size=BLOCK_64K.block_bytes)


def contiguous(count: int) -> tuple[Copy, ...]:
    size = BLOCK_64K.block_bytes
    return (Copy(2 * size, 2 * size, count * size),)


async def rounds(transport: Transport, peer: str, copies: tuple[Copy, ...]) -> float:
    spent: list[float] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        await transport.read(peer, copies, deadline_s=30).done
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


async def bench(backend: str) -> None:
    shared, child = SharedMemory(), None
    region = make_region(BLOCK_64K, NUM_BLOCKS)
    peer: PeerAddress
    if backend == "memory":
        owner = open_set(make_region(BLOCK_64K, NUM_BLOCKS, filled=True), (backend,), "owner", shared=shared)
        peer = address_of(owner, "owner")
    else:
        child, peer = await asyncio.to_thread(start_owner, backend, "owner", BLOCK_64K, NUM_BLOCKS)
    reader = open_set(region, (backend,), "reader", shared=shared)
    report = await reader.connect(peer)
    print(f"{backend}: {report.path}; preflight {report.latency_s * 1e6:.0f} us, {report.bytes_per_s / 1e9:.2f} GB/s")
    plans: tuple[tuple[str, Callable[[int], tuple[Copy, ...]]], ...] = (
        ("contiguous", contiguous),
        ("scattered", scattered),
    )
    for name, plan in plans:
        for count in (1, 16, 256, 1024):
            seconds = await rounds(reader._transports[0], peer.incarnation, plan(count))
            num_bytes = count * BLOCK_64K.block_bytes
            rate = num_bytes / seconds / 1e9
            print(f"  {name:10} {num_bytes / 2**20:7.3f} MiB {seconds * 1e3:8.3f} ms {rate:6.2f} GB/s")
    if child is None:
        begun = time.perf_counter()
        digest_blocks(region, range(NUM_BLOCKS))
        print(f"digest: {region.num_bytes / (time.perf_counter() - begun) / 1e9:.2f} GB/s")
    else:
        child.end()
    await reader.close()


async def main() -> None:
    for backend in ("memory", "nixl", "tcp"):
        await bench(backend)


if __name__ == "__main__":
    asyncio.run(main())
