"""Pulls one prompt's KV from its owner: watch the watermark, read behind it, release the lease.

    watch ──> more blocks ready ──> read them (a few reads at once) ─┐
      ^──────────────────────────────────────────────────────────────┤
                                nothing left to read ──> release ──> report

Knows the protocol; knows no socket and frees no block: the caller frees the target blocks when their reads have
settled, possibly after the pull failed or was cancelled. What is read next is a `ReadOrder`'s choice.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from diptych.clock import now_s
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


class ReadOrder(Protocol):
    """Chooses the tokens to read next. Each read begins and ends at a block border of both sides, or at the end of the
    ticket.
    """

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to be read."""
        ...

    def take(self, ready_tokens: int) -> tuple[int, int] | None:
        """The first token and the number of tokens of the next read, of the first `ready_tokens`. None: not now."""
        ...

    def completed(self, first_token: int) -> None:
        """The read from this token on is verified: its digests match, or the lease was valid after it."""
        ...


class InOrder:
    """A `ReadOrder`: all from `next_token` on, as soon as it is ready. Reads may end inside a longer block of ours."""

    def __init__(self, next_token: int, num_tokens: int) -> None:
        self._next = next_token
        self._stop = num_tokens

    @property
    def is_done(self) -> bool:
        return self._next >= self._stop

    def take(self, ready_tokens: int) -> tuple[int, int] | None:
        first, self._next = self._next, max(self._next, ready_tokens)
        return (first, self._next - first) if self._next > first else None

    def completed(self, first_token: int) -> None:
        pass


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
    order: ReadOrder | None = None,
) -> TransferReport:
    """Read the prompt's KV into `target_blocks` of `block_size` tokens; the first `skip_tokens` tokens are here.

    `pieces` are those of all our ranks. `order`: what to read of it; None: all, from the front. Returns when every byte
    has arrived, all digests match, and the owner has confirmed that the lease was valid to the end. Otherwise raises a
    `TransferError` (`PeerRefused` when the tokens that are here end inside a block of the owner), and the target blocks
    hold nothing usable but what `order` was told. On failure and on cancel, reads in flight are left to settle. The
    lease is extended while reads run, and not released on failure.
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
        order=order or InOrder(skip_tokens, ticket.num_tokens),
        proves_reads=order is not None,
    )
    begun = now_s()
    await run.follow()
    await client.release(ticket.lease, ticket.epoch)
    run.confirm()
    return TransferReport(
        lease=ticket.lease,
        transport=link.transport,
        path=link.path,
        num_blocks=len(target_blocks),
        num_bytes=sum(stats.num_bytes for stats in run.completed),
        num_reads=len(run.completed),
        num_descriptors=sum(stats.num_descriptors for stats in run.completed),
        reused_blocks=skip_tokens // block_size,
        digests_verified=sum(stats.num_digests for stats in run.completed),
        busy_s=run.busy_s,
        digest_s=sum(stats.digest_seconds for stats in run.completed),
        elapsed_s=now_s() - begun,
    )


class _Pull:
    """The state of one pull: how much of the ticket is ready, which reads are in flight, and what has completed."""

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
        order: ReadOrder,
        proves_reads: bool,
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
        self._skipped = -(-skip_tokens // self._source_size)
        self._client = client
        self._reader = reader
        self._ticket = ticket
        self._targets = target_blocks
        self._read_timeout_s = read_timeout_s
        self._loop = asyncio.get_running_loop()
        self._order = order
        self._confirms_reads = proves_reads
        self._unconfirmed: list[PullOrder] = []  # that have completed without digests
        self._ready = self._skipped
        self._digests: list[tuple[int, ...]] = []  # [piece][block - self._skipped]; none: unchecked
        self._finished = self._skipped == len(ticket.blocks)
        self._in_flight: dict[asyncio.Future[ReadStats], PullOrder] = {}
        self._busy_since = 0.0
        self.busy_s = 0.0
        self.completed: list[ReadStats] = []

    async def follow(self) -> None:
        """Watch and read until nothing is left to read."""
        watch: asyncio.Task[Progress] | None = None
        num_proven = 0  # reads that had completed when the watch began
        ttl_s = self._ticket.ttl_s
        beat = self._loop.time()
        try:
            while not self._order.is_done or self._in_flight:
                period_s = min(LONGEST_WATCH_S, ttl_s / HEARTBEATS_PER_TTL)
                due_s = beat + period_s - self._loop.time() if self._finished and not self._unconfirmed else 0.0
                if watch is None and due_s <= 0:
                    beat, num_proven = self._loop.time(), len(self._unconfirmed)
                    watch = self._loop.create_task(self._watch(period_s))
                waiting: set[asyncio.Future[ReadStats] | asyncio.Task[Progress]] = {*self._in_flight}
                if watch:
                    waiting.add(watch)
                await asyncio.wait(waiting, timeout=None if watch else due_s, return_when=asyncio.FIRST_COMPLETED)
                self._collect()
                if watch and watch.done():
                    ttl_s = self._take(watch.result())
                    self.confirm(num_proven)
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
            is_mixed = self._ready > self._skipped and bool(new) != bool(self._digests)
            if len(new) not in (0, len(self._pieces)) or is_mixed or any(len(piece) != fresh for piece in new):
                raise PeerRefused(f"{self._ticket.lease}: the owner sent no digests for some of its blocks")
            self._digests = [old + added for old, added in zip(self._digests or [()] * len(new), new, strict=True)]
            self._ready = progress.ready_blocks
        self._finished = progress.finished
        return progress.ttl_s

    def _request(self) -> None:
        """Start the reads that are next, as far as there is room for them."""
        ready_tokens = min(self._ready * self._source_size, self._ticket.num_tokens)
        while len(self._in_flight) < READS_AT_ONCE and (taken := self._order.take(ready_tokens)) is not None:
            first_token, num_tokens = taken
            first, stop = covering(self._source_size, first_token, num_tokens)
            start, end = covering(self._target_size, first_token, num_tokens)
            digests = [piece[first - self._skipped : stop - self._skipped] for piece in self._digests]
            order = PullOrder(
                peer=self._ticket.owner.incarnation,
                source_blocks=self._ticket.blocks[first:stop],
                target_blocks=self._targets[start - self._first_target : end - self._first_target],
                first_token=first_token,
                num_tokens=num_tokens,
                digests=tuple(zip(self._pieces, digests, strict=True)) if digests else (),
                deadline_s=self._read_timeout_s,
            )
            if not self._in_flight:
                self._busy_since = now_s()
            self._in_flight[self._reader(order).done] = order

    def confirm(self, count: int | None = None) -> None:
        """The lease was valid after the first `count` reads without digests that completed, or after all."""
        for order in self._unconfirmed[:count]:
            self._order.completed(order.first_token)
        del self._unconfirmed[:count]

    def _collect(self) -> None:
        """Take in the reads that ended. Raises the first failure."""
        for done in [done for done in self._in_flight if done.done()]:
            order = self._in_flight.pop(done)
            self.completed.append(done.result())
            if order.digests:
                self._order.completed(order.first_token)
            elif self._confirms_reads:
                self._unconfirmed.append(order)
            if not self._in_flight:
                self.busy_s += now_s() - self._busy_since
