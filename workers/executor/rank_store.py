"""A rank's blocks behind its host memory: adapts a disk or a remote server, and the host blocks of the rank, to the
engine's `BlockStore` port; and opens those that the configuration has.
"""

import asyncio
import logging
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from diptych.background_tasks import BackgroundTasks
from workers.config import WorkerConfig
from workers.engine.kv_event_log import Tier
from workers.errors import KVStoreError
from workers.executor.kv_pool import KVPool
from workers.kv_store.health import KVStoreStats
from workers.kv_store.kv_store import KVStore, open_kv_store
from workers.kv_store.slot_format import fingerprint
from workers.stats import TierStats

if TYPE_CHECKING:
    from workers.kv_store.remote_store import RemoteStore

logger = logging.getLogger(__name__)


class Store(Protocol):
    """The interface of a disk and of a remote server of blocks; see `KVStore`."""

    read_byte_s: float

    def watch(self, added: Callable[[bytes, int], object], gone: Callable[[bytes], object]) -> dict[bytes, int]: ...
    def write(self, block_hash: bytes, block: memoryview, prefix: int | None = None) -> Awaitable[bool]: ...
    async def read(self, block_hash: bytes, target: memoryview, timeout_s: float) -> bool: ...
    def forget(self, hashes: Iterable[bytes]) -> None: ...
    def stats(self) -> KVStoreStats: ...
    async def close(self) -> None: ...


class RankStore(ABC):
    """Owned by a rank, which closes it. Used on one event loop. `changed` is called when a read has ended."""

    tier: Tier
    store: Store

    def __init__(self, store: Store, pool: KVPool, shared_as: str = "") -> None:
        self.store = store
        self.shared_as = shared_as
        self.read_byte_s = store.read_byte_s
        self.changed: Callable[[], None] = lambda: None
        self._host = pool.host.flatten(1).view(torch.uint8).numpy()  # [host block, byte], the same memory
        self._tasks = BackgroundTasks()
        self._closed = False

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        return self.store.watch(added, gone)

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


class DiskCache(RankStore):
    tier = Tier.DISK
    store: KVStore

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        found(self.store.match(hashes))

    async def written(self, block_hash: bytes, prefix: int | None, block: int) -> bool:
        await super().written(block_hash, prefix, block)
        return self.store.match([block_hash]) == 1  # it may be there already, or gone already


class RemoteCache(RankStore):
    tier = Tier.REMOTE
    store: "RemoteStore"

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        async def find() -> None:
            found(await self.store.find(hashes, timeout_s))
            self._tell()

        if hashes:
            self._tasks.start(find())
        else:
            found(0)


def kv_fingerprint(config: WorkerConfig, pool: KVPool) -> bytes:
    """Equal on workers whose blocks of the same tokens have the same bytes, or almost."""
    device = pool.blocks.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = version("diptych"), torch.__version__
    return fingerprint(pool.region.layout, *versions, kind, str(config.engine.deterministic))


def open_disk_cache(config: WorkerConfig, pool: KVPool) -> DiskCache | None:
    """None if the configuration has none. The workers of a host share `cache.disk.path`. Blocks.

    Raises `KVStoreError`.
    """
    disk = config.cache.disk
    if disk is None:
        return None
    size_bytes = disk.size // config.parallel.world_size
    store = open_kv_store(Path(disk.path), size_bytes, pool.region.layout.block_bytes, kv_fingerprint(config, pool))
    stats = store.stats()
    how = "direct" if stats.is_direct else "buffered"
    found = f"{stats.num_stored} of {stats.num_slots} blocks found in {store.path}"
    logger.info("%s: %s, %s I/O, read at %.0f MB/s", config.name, found, how, 1e-6 / store.read_byte_s)
    return DiskCache(store, pool)


def open_remote_cache(config: WorkerConfig, pool: KVPool) -> RemoteCache | None:
    """None if the configuration has none. Blocks for a few seconds at most, also if the server does not answer.

    Raises `KVStoreError`.
    """
    remote = config.cache.remote
    if remote is None:
        return None
    try:
        from workers.kv_store.remote_store import open_remote_store
    except ImportError as error:
        raise KVStoreError(
            f"cache.remote needs {error.name}, which is not installed: pip install 'diptych[remote]'"
        ) from None
    try:
        password = Path(remote.password_file).read_text().strip() if remote.password_file else None
    except OSError as error:
        raise KVStoreError(f"cache.remote.password_file: {error}") from None
    try:
        ssl.create_default_context(cafile=remote.ca_file or None)
    except OSError as error:
        raise KVStoreError(f"cache.remote.ca_file {remote.ca_file}: {error}") from None
    computed_by, block_bytes = kv_fingerprint(config, pool), pool.region.layout.block_bytes
    store = open_remote_store(remote.url, password, remote.ca_file or None, computed_by, block_bytes)
    logger.info("%s: %s, read at %.0f MB/s", config.name, remote.url, 1e-6 / store.read_byte_s)
    shared_as = blake2b(remote.url.encode() + computed_by, digest_size=8).hexdigest()
    return RemoteCache(store, pool, shared_as)
