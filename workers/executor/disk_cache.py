"""The disk of a prefix cache."""

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from workers.config import WorkerConfig
from workers.engine.kv_event_log import Tier
from workers.executor.kv_pool import KVPool
from workers.executor.rank_store import RankStore
from workers.kv_store.kv_store import KVStore, open_kv_store
from workers.kv_store.slot_format import fingerprint

logger = logging.getLogger(__name__)


class DiskCache(RankStore[KVStore]):
    tier = Tier.DISK

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        self.store.watch(added, gone)
        return self.store.found_prefixes

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        found(self.store.match(hashes))

    async def written(self, block_hash: bytes, prefix: int | None, block: int) -> bool:
        await super().written(block_hash, prefix, block)
        return self.store.match([block_hash]) == 1  # it may be there already, or gone already


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
