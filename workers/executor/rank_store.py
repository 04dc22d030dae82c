"""A rank's blocks behind its host memory: adapts a KV store, and the host blocks of the rank, to the engine's
`BlockStore` port.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from diptych.background_tasks import BackgroundTasks
from workers.engine.kv_event_log import Tier
from workers.executor.kv_pool import KVPool
from workers.kv_store.health import KVStoreStats
from workers.stats import TierStats


class Store(Protocol):
    """What a disk and a server of blocks have in common: see `KVStore`."""

    read_byte_s: float

    def write(self, block_hash: bytes, block: memoryview, prefix: int | None = None) -> Awaitable[bool]: ...
    async def read(self, block_hash: bytes, target: memoryview, timeout_s: float) -> bool: ...
    def forget(self, hashes: Iterable[bytes]) -> None: ...
    def stats(self) -> KVStoreStats: ...
    async def close(self) -> None: ...


S = TypeVar("S", bound=Store)


class RankStore(ABC, Generic[S]):
    """Owned by a rank, which closes it. Used on one event loop. `changed` is called when a read has ended."""

    tier: Tier

    def __init__(self, store: S, pool: KVPool, shared_as: str = "") -> None:
        self.store = store
        self.shared_as = shared_as
        self.read_byte_s = store.read_byte_s
        self.changed: Callable[[], None] = lambda: None
        self._host = pool.host.flatten(1).view(torch.uint8).numpy()  # [host block, byte], the same memory
        self._tasks = BackgroundTasks()
        self._closed = False

    @abstractmethod
    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]: ...

    @abstractmethod
    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None: ...

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        async def write() -> None:
            done(await self.written(block_hash, prefix, block))

        self._tasks.start(write())

    async def written(self, block_hash: bytes, prefix: int | None, block: int) -> bool:
        """As `write`."""
        return await asyncio.shield(asyncio.ensure_future(self.store.write(block_hash, self._host[block].data, prefix)))

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        async def read() -> None:
            begun_s = time.monotonic()
            arrived = await self.arrived(block_hash, block, timeout_s)
            done(arrived, time.monotonic() - begun_s)
            self._tell()

        self._tasks.start(read())

    async def arrived(self, block_hash: bytes, block: int, timeout_s: float) -> bool:
        """As `read`."""
        return await self.store.read(block_hash, self._host[block].data, timeout_s)

    def _tell(self) -> None:
        if not self._closed:
            self.changed()

    def forget(self, hashes: Iterable[bytes]) -> None:
        self.store.forget(hashes)

    def stats(self) -> TierStats:
        found, size = self.store.stats(), self._host.shape[1]
        return TierStats(
            self.tier.value,
            blocks=found.num_stored,
            capacity_blocks=found.num_slots,
            block_bytes=size,
            read_bytes=found.reads * size,
            written_bytes=found.writes * size,
            dropped_blocks=found.writes_dropped,
            late=found.late,
            failures=found.read_failures + found.write_failures + found.corrupt,
            problem=found.problem,
        )

    async def close(self) -> None:
        """End what is in progress; what is stored stays there."""
        self._closed = True
        await self.store.close()
        await asyncio.gather(*self._tasks)
