"""Pulls one prompt's KV from its owner: watch the watermark, read behind it, release the lease.

    watch ──> more blocks ready ──> read them (a few reads at once) ─┐
      ^──────────────────────────────────────────────────────────────┤
                                   finished, all read ──> release ──> report

Knows the protocol; knows no socket and frees no block: the caller frees the target blocks when their reads have
settled, possibly after the pull failed or was cancelled.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvtransfer.copies import covering
from kvtransfer.errors import PeerRefused, TransferError
from kvtransfer.ticket import LinkReport, Piece, Progress, TransferReport, TransferTicket
from kvtransfer.transport import PullOrder, Read, ReadStats

READS_AT_ONCE = 2  # one on the wire, one in the digest check
LONGEST_WATCH_S = 10.0
HEARTBEATS_PER_TTL = 3


class LeaseClient(Protocol):
    """The part of `ControlClient` that a pull uses."""

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress: ...

    async def release(self, lease: str, epoch: int) -> None: ...


async def pull(
    client: LeaseClient,
    reader: Callable[[PullOrder], Read],
    ticket: TransferTicket,
    target_blocks: tuple[int, ...],
    *,
    link: LinkReport,
    read_timeout_s: float,
    block_size: int,
    pieces: tuple[Piece, ...],
    skip_tokens: int = 0,
) -> TransferReport:
    """Read the prompt's KV into `target_blocks` of `block_size` tokens; the first `skip_tokens` tokens are here.

    `pieces` are those of all our ranks. Returns when every byte has arrived, all digests match, and the owner has
    confirmed that the lease was valid to the end. Otherwise raises a `TransferError` (`PeerRefused` when the tokens
    that are here end inside a block of the owner), and the target blocks hold nothing usable. On failure and on cancel,
    reads in flight are left to settle. The lease is extended while reads run, and not released on failure.
    """
    run = _Pull(
        client=client,
        reader=reader,
        ticket=ticket,
        target_blocks=target_blocks,
        pieces=pieces,
        block_size=block_size,
        skip_tokens=skip_tokens,
        read_timeout_s=read_timeout_s,
    )
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await run.follow()
    await client.release(ticket.lease, ticket.epoch)
    return TransferReport(
        lease=ticket.lease,
        transport=link.transport,
        path=link.path,
        num_blocks=len(target_blocks),
        num_bytes=sum(stats.num_bytes for stats in run.landed),
        num_reads=len(run.landed),
        num_descriptors=sum(stats.num_descriptors for stats in run.landed),
        reused_blocks=skip_tokens // block_size,
        digests_verified=sum(stats.num_digests for stats in run.landed),
        busy_s=run.busy_s,
        digest_s=sum(stats.digest_seconds for stats in run.landed),
        elapsed_s=loop.time() - begun,
    )


class _Pull:
    """The state of one pull: blocks of the ticket that are ready, requested and landed.

    If our blocks are longer, an order may end inside one of them, and the next one begins there.
    """

    def __init__(
        self,
        client: LeaseClient,
        reader: Callable[[PullOrder], Read],
        ticket: TransferTicket,
        target_blocks: tuple[int, ...],
        pieces: tuple[Piece, ...],
        block_size: int,
        skip_tokens: int,
        read_timeout_s: float,
    ) -> None:
        left = ticket.num_tokens - skip_tokens
        self._first_target, stop = covering(block_size, skip_tokens, left)
        if left < 0 or (skip_tokens % block_size and left) or stop - self._first_target != len(target_blocks):
            raise ValueError(
                f"{len(target_blocks)} target blocks cannot take {left} tokens of the ticket {ticket.lease}"
            )
        self._source_size = ticket.owner.shards[0].layout.block_size
        if len(ticket.blocks) != -(-ticket.num_tokens // self._source_size):
            raise PeerRefused(f"{ticket.lease}: {len(ticket.blocks)} blocks do not hold {ticket.num_tokens} tokens")
        if left and skip_tokens % self._source_size:
            raise PeerRefused(
                f"{ticket.lease}: the {skip_tokens} tokens that are here end inside a block of the owner, which has "
                f"{self._source_size} tokens: set prefix_tokens to a common multiple of both block sizes"
            )
        self._pieces = pieces
        self._target_size = block_size
        skip_blocks = -(-skip_tokens // self._source_size)
        self._client = client
        self._reader = reader
        self._ticket = ticket
        self._targets = target_blocks
        self._read_timeout_s = read_timeout_s
        self._loop = asyncio.get_running_loop()
        self._ready = skip_blocks
        self._requested = skip_blocks
        self._digests: list[tuple[int, ...]] = []  # [piece][block - self._requested]; none: unchecked
        self._finished = skip_blocks == len(ticket.blocks)
        self._in_flight: set[asyncio.Future[ReadStats]] = set()
        self._busy_since = 0.0
        self.busy_s = 0.0
        self.landed: list[ReadStats] = []

    async def follow(self) -> None:
        """Watch and read until all blocks are here."""
        watch: asyncio.Task[Progress] | None = None
        ttl_s = self._ticket.ttl_s
        beat = self._loop.time()
        try:
            while self._requested < len(self._ticket.blocks) or self._in_flight:
                period_s = min(LONGEST_WATCH_S, ttl_s / HEARTBEATS_PER_TTL)
                due_s = beat + period_s - self._loop.time() if self._finished else 0.0
                if watch is None and due_s <= 0:
                    beat = self._loop.time()
                    watch = self._loop.create_task(self._watch(period_s))
                waiting: set[asyncio.Future[ReadStats] | asyncio.Task[Progress]] = {*self._in_flight}
                if watch:
                    waiting.add(watch)
                await asyncio.wait(waiting, timeout=None if watch else due_s, return_when=asyncio.FIRST_COMPLETED)
                self._collect()
                if watch and watch.done():
                    ttl_s = self._take(watch.result())
                    watch = None
                self._request()
        finally:
            if watch:
                watch.cancel()
                watch.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the first error counts

    async def _watch(self, timeout_s: float) -> Progress:
        lease, epoch = self._ticket.lease, self._ticket.epoch
        return await self._client.watch(lease, epoch, self._ready, timeout_s, self._pieces)

    def _take(self, progress: Progress) -> float:
        """Move the watermark and keep the new digests; returns the lease's time to live."""
        fresh = progress.ready_blocks - self._ready
        total = len(self._ticket.blocks)
        if progress.first_block > self._ready or progress.ready_blocks > total:
            raise PeerRefused(
                f"{self._ticket.lease}: the owner reports blocks {progress.first_block}..{progress.ready_blocks} of "
                f"{total} to a watch from {self._ready} on"
            )
        if progress.finished and progress.ready_blocks < total:
            raise TransferError(
                f"{self._ticket.lease}: the owner stopped after {progress.ready_blocks} of {total} blocks"
            )
        if fresh > 0:
            known = self._ready - progress.first_block
            new = [piece[known : known + fresh] for piece in progress.digests]
            unasked = len(new) not in (0, len(self._pieces)) or (self._digests and not new)
            if unasked or any(len(piece) != fresh for piece in new):
                raise PeerRefused(f"{self._ticket.lease}: the owner sent no digests for some of its blocks")
            self._digests = [old + added for old, added in zip(self._digests or [()] * len(new), new, strict=True)]
            self._ready = progress.ready_blocks
        self._finished = progress.finished
        return progress.ttl_s

    def _request(self) -> None:
        """Start one read of all that is ready, if there is room for a read."""
        if self._requested == self._ready or len(self._in_flight) >= READS_AT_ONCE:
            return
        first_token = self._requested * self._source_size
        num_tokens = min(self._ready * self._source_size, self._ticket.num_tokens) - first_token
        start, stop = covering(self._target_size, first_token, num_tokens)
        order = PullOrder(
            peer=self._ticket.owner.incarnation,
            source_blocks=self._ticket.blocks[self._requested : self._ready],
            target_blocks=self._targets[start - self._first_target : stop - self._first_target],
            first_token=first_token,
            num_tokens=num_tokens,
            digests=tuple(zip(self._pieces, self._digests, strict=True)) if self._digests else (),
            deadline_s=self._read_timeout_s,
        )
        if not self._in_flight:
            self._busy_since = self._loop.time()
        self._in_flight.add(self._reader(order).done)
        self._requested, self._digests = self._ready, []

    def _collect(self) -> None:
        """Take in the reads that ended. Raises the first failure."""
        for done in [done for done in self._in_flight if done.done()]:
            self._in_flight.discard(done)
            self.landed.append(done.result())
            if not self._in_flight:
                self.busy_s += self._loop.time() - self._busy_since
