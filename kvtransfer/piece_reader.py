"""Reads one piece of a reader's KV: plan, read, check, and convert where the owner's format differs.

    same format    plan ── read into our blocks ── compare digests
    other format   plan ── read into a slot of the staging area ── compare digests ── place into our blocks   } in turn

The format differs in dtype, or in block size where there is a staging area: a staged block is one range or a few, while
direct reads between block sizes need a range for each head, layer, K and V. Knows links; knows no lease.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from kvtransfer.copies import covering, plan_copies
from kvtransfer.digest import spans_of, verify_piece
from kvtransfer.errors import PeerRefused, TransferTimeout
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece, ShardAddress
from kvtransfer.transport import ALIGNMENT, Place, PullOrder, Read, ReadStats, Region, Transport, summed

SLOTS = 2  # of the staging area: one on the wire, one in the check

Failed = Callable[[Exception], None]


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A verified connection to one of the owner's ranks, and the piece of our KV that it holds."""

    transport: Transport
    name: str  # of the rank, see `rank_name`
    shard: ShardAddress
    piece: Piece


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one piece of an order: all of them, or as many as fit a slot. Fields as in `PullOrder`."""

    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    first_token: int
    num_tokens: int
    digests: tuple[int, ...]


class PieceReader:
    """Owned by a TransportSet, for all its links. `checker` is the thread that checks and places while reads go on.

    A slot stays in use until its read has settled and its content is placed, so a late write never damages other KV.
    """

    def __init__(self, region: Region, checker: Executor, place: Place | None, *, verifies: bool) -> None:
        self._region = region
        self._checker = checker
        self._place = place
        self._verifies = verifies
        self._slot_bytes = region.staging_bytes // SLOTS // ALIGNMENT * ALIGNMENT
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(SLOTS):
            self._slots.put_nowait(region.staging_offset + slot * self._slot_bytes)

    def refuse(self, source: KVLayout, pieces: Sequence[Piece]) -> None:
        """Raise `PeerRefused` when these pieces of `source` cannot be converted to our format."""
        ours = self._region.layout
        if source.dtype == ours.dtype or all(self._stages(source, piece) for piece in pieces):
            return
        pair = f"the owner's KV is {source.dtype}, ours {ours.dtype}"
        if self._place is None:
            raise PeerRefused(f"{pair}, and this rank does not convert: use one dtype")
        least = SLOTS * max(-(-_staged(source, piece).block_bytes // ALIGNMENT) * ALIGNMENT for piece in pieces)
        raise PeerRefused(
            f"{pair}, and a staging area of {self._region.staging_bytes} bytes has no room for {SLOTS} of its blocks: "
            f"set transfer.staging_bytes to {least}, or better to many times as much, or use one dtype on both sides"
        )

    async def read(
        self, order: PullOrder, link: PeerLink, digests: tuple[int, ...], failed: Failed
    ) -> ReadStats | None:
        """Read the link's piece of an order into our blocks; returns when nothing of it is written any more.

        `digests` has one number for each source block, or none. A failure is passed to `failed` at once, while the
        read may still write; then the result is None.
        """
        loop = asyncio.get_running_loop()
        stop_s = loop.time() + order.deadline_s
        whole = _Part(order.source_blocks, order.target_blocks, order.first_token, order.num_tokens, digests)
        try:
            if not self._stages(link.shard.layout, link.piece):
                return await self._read_directly(whole, link, order.deadline_s, failed)
            completed: list[ReadStats] = []
            for part in self._parts(whole, link):
                stats = await self._read_staged(part, link, max(0.0, stop_s - loop.time()), failed)
                if stats is None:
                    return None
                completed.append(stats)
            return replace(summed(completed), seconds=sum(stats.seconds for stats in completed))
        except Exception as error:
            failed(error)
            return None

    def check(self) -> None:
        """Prove that no slot is free twice. Raises AssertionError."""
        assert self._slots.qsize() <= SLOTS

    def _stages(self, source: KVLayout, piece: Piece) -> bool:
        ours = self._region.layout
        if (source.dtype, source.block_size) == (ours.dtype, ours.block_size) or self._place is None:
            return False
        return _staged(source, piece).block_bytes <= self._slot_bytes

    def _parts(self, whole: _Part, link: PeerLink) -> Iterator[_Part]:
        """Split at the owner's block borders, so that each part fits a slot."""
        size = link.shard.layout.block_size
        most = self._slot_bytes // _staged(link.shard.layout, link.piece).block_bytes
        for first in range(0, len(whole.source_blocks), most):
            blocks = whole.source_blocks[first : first + most]
            first_token = whole.first_token + first * size
            num_tokens = min(len(blocks) * size, whole.first_token + whole.num_tokens - first_token)
            start, stop = covering(self._region.layout.block_size, first_token, num_tokens)
            before, _ = covering(self._region.layout.block_size, whole.first_token, 0)
            targets = whole.target_blocks[start - before : stop - before]
            yield _Part(blocks, targets, first_token, num_tokens, whole.digests[first : first + most])

    async def _read_directly(self, part: _Part, link: PeerLink, deadline_s: float, failed: Failed) -> ReadStats | None:
        source, ours, piece = link.shard.layout, self._region.layout, link.piece
        blocks, first, count = part.target_blocks, part.first_token, part.num_tokens
        copies = plan_copies(piece, source, ours, part.source_blocks, blocks, first, count)
        stats = await _completed(link.transport.read(link.name, copies, deadline_s=deadline_s), failed)
        if stats is None or not self._verifies or not part.digests:
            return stats
        count = ours.digested_tokens(count)
        spans = spans_of(source.block_size, ours.block_size, blocks, first, count)
        return await self._check(
            stats, part, lambda: verify_piece(self._region, 0, ours, piece, spans, part.digests, part.source_blocks)
        )

    async def _read_staged(self, part: _Part, link: PeerLink, deadline_s: float, failed: Failed) -> ReadStats | None:
        stop_s = asyncio.get_running_loop().time() + deadline_s
        staged, piece, place = _staged(link.shard.layout, link.piece), link.piece, self._place
        assert place is not None
        blocks = tuple(range(len(part.source_blocks)))
        first, count = part.first_token, part.num_tokens
        copies = plan_copies(piece, link.shard.layout, staged, part.source_blocks, blocks, first, count)
        async with self._slot(deadline_s) as offset:
            copies[:, 1] += offset
            left_s = max(0.0, stop_s - asyncio.get_running_loop().time())
            stats = await _completed(link.transport.read(link.name, copies, deadline_s=left_s), failed)
            if stats is None:
                return None

            def check_and_place() -> None:
                if part.digests:
                    spans = spans_of(staged.block_size, staged.block_size, blocks, 0, count)
                    verify_piece(self._region, offset, staged, piece, spans, part.digests, part.source_blocks)
                place(offset, staged, part.target_blocks, first, count)

            return await self._check(stats, part, check_and_place)

    async def _check(self, stats: ReadStats, part: _Part, work: Callable[[], None]) -> ReadStats:
        """Run a check on the checker's thread while the next read goes on."""
        begun = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(self._checker, work)
        return replace(stats, num_digests=len(part.digests), digest_seconds=time.perf_counter() - begun)

    @asynccontextmanager
    async def _slot(self, deadline_s: float) -> AsyncIterator[int]:
        """The offset of a free slot within the region. Raises `TransferTimeout` when none gets free in time."""
        try:
            async with asyncio.timeout(deadline_s):
                offset = await self._slots.get()
        except TimeoutError:
            raise TransferTimeout(
                f"the staging area had no room within {deadline_s:.1f} s: raise transfer.staging_bytes, or try again"
            ) from None
        try:
            yield offset
        finally:
            self._slots.put_nowait(offset)


async def _completed(read: Read, failed: Failed) -> ReadStats | None:
    """Await a read until it has settled; pass its failure on at once."""
    try:
        return await read.done
    except Exception as error:
        failed(error)
        return None
    finally:
        await read.settled


def _staged(source: KVLayout, piece: Piece) -> KVLayout:
    """A piece's layout in the staging area: the owner's block size and dtype, with our heads and layers only."""
    return replace(source, heads=piece.heads, layers=piece.layers)
