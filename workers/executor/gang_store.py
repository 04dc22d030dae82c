"""A store of a gang: each rank stores its shard of a block, and a block is there if all ranks have theirs.

The leader's own store says what is looked for. A rank that misses makes the block a miss for all. Each rank keeps its
own deadline, so its host memory is free for others once it has answered.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from diptych.background_tasks import BackgroundTasks
from workers.executor.rank_store import RankStore
from workers.executor.remote_rank import RemoteRank
from workers.stats import TierStats


class GangStore:
    """`BlockStore` of a GangExecutor, which closes it after the ranks' connections. Its rank closes `own`.

    `block_bytes`: of a block on all ranks. Statistics are the leader's, as bytes of all ranks.
    """

    def __init__(self, own: RankStore, others: Sequence[RemoteRank], block_bytes: int) -> None:
        self.tier, self.shared_as = own.tier, own.shared_as
        self._own, self._others, self._block_bytes = own, others, block_bytes
        self._share = own.stats().block_bytes / block_bytes
        self.read_byte_s = own.read_byte_s * self._share  # all ranks read at the same time
        self.changed: Callable[[], None] = lambda: None
        self._asking = BackgroundTasks()

    def watch(self, added: Callable[[bytes, int], None], gone: Callable[[bytes], None]) -> dict[bytes, int]:
        return self._own.watch(added, gone)

    def find(self, hashes: Sequence[bytes], timeout_s: float, found: Callable[[int], None]) -> None:
        def ended(count: int) -> None:
            found(count)
            self.changed()

        self._own.find(hashes, timeout_s, ended)

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        own = self._own.written(block_hash, prefix, block)
        self._ask([own, *(other.write_block(self.tier, block_hash, prefix, block) for other in self._others)], done)

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        begun_s = time.monotonic()

        def ended(arrived: bool) -> None:
            done(arrived, time.monotonic() - begun_s)
            self.changed()

        own = self._own.arrived(block_hash, block, timeout_s)
        self._ask([own, *(other.read_block(self.tier, block_hash, block, timeout_s) for other in self._others)], ended)

    def _ask(self, ranks: Sequence[Awaitable[bool]], done: Callable[[bool], None]) -> None:
        """`done` once all ranks have answered, or are lost: until then they may use their host blocks."""

        async def ask() -> None:
            found: list[Any] = await asyncio.gather(*ranks, return_exceptions=True)
            done(all(each is True for each in found))

        self._asking.start(ask())

    def forget(self, hashes: Iterable[bytes]) -> None:
        hashes = tuple(hashes)
        self._own.forget(hashes)
        for other in self._others:
            other.forget_blocks(self.tier, hashes)

    def stats(self) -> TierStats:
        own = self._own.stats()
        return structs.replace(
            own,
            block_bytes=self._block_bytes,
            read_bytes=round(own.read_bytes / self._share),
            written_bytes=round(own.written_bytes / self._share),
        )

    async def close(self) -> None:
        """After the ranks have answered or are lost, and the leader's own store has closed."""
        await asyncio.gather(*self._asking)
