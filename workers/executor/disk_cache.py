"""The disk of a prefix cache: adapts a KV store, and the host blocks of a rank, to the engine's `BlockStore` port."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from workers.config import WorkerConfig
from workers.engine.cache_log import Tier
from workers.executor.kv_pool import KVPool
from workers.kv_store.kv_store import KVStore, open_kv_store
from workers.kv_store.slot_format import fingerprint
from workers.stats import TierStats

logger = logging.getLogger(__name__)


class DiskCache:
    """Owned by a rank, which closes it. Used on one event loop. `changed` is called when a read has ended."""

    tier = Tier.DISK
    shared_as = ""

    def __init__(self, store: KVStore, pool: KVPool) -> None:
        self.store = store
        self.read_byte_s = store.read_byte_s
        self.changed: Callable[[], None] = lambda: None
        self._host = pool.host.flatten(1).view(torch.uint8).numpy()  # [host block, byte], the same memory
        self._reading: set[asyncio.Task[None]] = set()
        self._closed = False

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        self.store.watch(added, gone)
        return self.store.found_prefixes

    def find(self, names: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        found(self.store.match(names))

    def write(self, name: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        written = self.store.write(name, self._host[block].data, prefix)
        written.add_done_callback(lambda _: done(self.store.match([name]) == 1))  # it may be gone already

    async def written(self, name: bytes, prefix: int | None, block: int) -> bool:
        """As `write`."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.write(name, prefix, block, done.set_result)
        return await asyncio.shield(done)

    def read(self, name: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        reading = asyncio.ensure_future(self._read(name, block, timeout_s, done))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    async def _read(self, name: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        begun_s = time.monotonic()
        arrived = await self.arrived(name, block, timeout_s)
        done(arrived, time.monotonic() - begun_s)
        if not self._closed:
            self.changed()

    async def arrived(self, name: bytes, block: int, timeout_s: float) -> bool:
        """As `read`."""
        return await self.store.read(name, self._host[block].data, timeout_s)

    def forget(self, names: Iterable[bytes]) -> None:
        self.store.forget(names)

    def stats(self) -> TierStats:
        found, size = self.store.stats(), self._host.shape[1]
        stopped = (
            ("reads stopped", found.stopped_reads),
            ("writes stopped", found.stopped_writes),
            ("a peer's slab", found.stopped_peers),
        )
        return TierStats(
            "disk",
            blocks=found.num_stored,
            capacity_blocks=found.num_slots,
            block_bytes=size,
            read_bytes=found.reads * size,
            written_bytes=found.writes * size,
            dropped_blocks=found.writes_dropped,
            late=found.late,
            failures=found.read_failures + found.write_failures + found.corrupt,
            problem="; ".join(f"{what}: {why}" for what, why in stopped if why),
        )

    async def close(self) -> None:
        """End what is in progress; what is stored stays on the disk."""
        self._closed = True
        await self.store.close()
        await asyncio.gather(*self._reading)


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
