"""A server of KV blocks as a tier of the prefix cache: adapts a remote store, and the host blocks of a rank, to the
engine's `BlockStore` port.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.config import WorkerConfig
from workers.engine.cache_log import Tier
from workers.errors import KVStoreError
from workers.executor.disk_cache import kv_fingerprint
from workers.executor.kv_pool import KVPool
from workers.stats import TierStats

if TYPE_CHECKING:
    from workers.kv_store.remote_store import RemoteStore

logger = logging.getLogger(__name__)


class RemoteCache:
    """Owned by a rank, which closes it. Used on one event loop. `changed` is called when a read has ended."""

    tier = Tier.REMOTE

    def __init__(self, store: "RemoteStore", pool: KVPool, shared_as: str) -> None:
        self.store = store
        self.shared_as = shared_as
        self.read_byte_s = store.read_byte_s
        self.changed: Callable[[], None] = lambda: None
        self._host = pool.host.flatten(1).view(torch.uint8).numpy()  # [host block, byte], the same memory
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        self.store.added, self.store.known.gone = added, gone
        self.store.start()
        return {}

    def find(self, names: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        async def find() -> None:
            found(await self.store.find(names, timeout_s))
            self._tell()

        if names:
            self._begin(find())
        else:
            found(0)

    def write(self, name: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        async def write() -> None:
            done(await self.written(name, prefix, block))

        self._begin(write())

    async def written(self, name: bytes, prefix: int | None, block: int) -> bool:
        """As `write`."""
        return await self.store.write(name, self._host[block].data, prefix)

    def read(self, name: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        async def read() -> None:
            begun_s = time.monotonic()
            arrived = await self.arrived(name, block, timeout_s)
            done(arrived, time.monotonic() - begun_s)
            self._tell()

        self._begin(read())

    async def arrived(self, name: bytes, block: int, timeout_s: float) -> bool:
        """As `read`."""
        return await self.store.read(name, self._host[block].data, timeout_s)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self) -> None:
        if not self._closed:
            self.changed()

    def forget(self, names: Iterable[bytes]) -> None:
        self.store.forget(names)

    def stats(self) -> TierStats:
        found, size = self.store.stats(), self._host.shape[1]
        stopped = ("reads stopped", found.stopped_reads), ("writes stopped", found.stopped_writes)
        return TierStats(
            "remote",
            blocks=found.known,
            block_bytes=size,
            read_bytes=found.reads * size,
            written_bytes=found.writes * size,
            dropped_blocks=found.writes_dropped,
            late=found.late,
            failures=found.failures + found.corrupt,
            problem="; ".join(f"{what}: {why}" for what, why in stopped if why),
        )

    async def close(self) -> None:
        """End what is in progress; what is stored stays on the server."""
        self._closed = True
        await self.store.close()
        await asyncio.gather(*self._tasks)


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
