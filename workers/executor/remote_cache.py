"""A server of KV blocks as a tier of the prefix cache."""

import logging
import ssl
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from workers.config import WorkerConfig
from workers.engine.kv_event_log import Tier
from workers.errors import KVStoreError
from workers.executor.disk_cache import kv_fingerprint
from workers.executor.kv_pool import KVPool
from workers.executor.rank_store import RankStore

if TYPE_CHECKING:
    from workers.kv_store.remote_store import RemoteStore  # noqa: F401

logger = logging.getLogger(__name__)


class RemoteCache(RankStore["RemoteStore"]):
    tier = Tier.REMOTE

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        self.store.added, self.store.known.gone = added, gone
        self.store.start()
        return {}

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        async def find() -> None:
            found(await self.store.find(hashes, timeout_s))
            self._tell()

        if hashes:
            self._tasks.start(find())
        else:
            found(0)


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
