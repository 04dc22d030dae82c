"""Pulls KV from other workers: into the blocks of a reservation, or, for a prefix, into this worker's cache.

Knows the engine, tickets and peers; knows no subscriber.
"""

import asyncio
import logging
from collections.abc import Callable

from diptych.clock import now_s
from kvtransfer.control import ControlClient
from kvtransfer.copies import covering, union_of_pieces
from kvtransfer.errors import DigestMismatch, PeerLost, TransferError, Unlinked
from kvtransfer.pull import ReadOrder, pull
from kvtransfer.ticket import LinkReport, PeerAddress, TransferReport, TransferTicket
from kvtransfer.transport import PullOrder, Read
from workers.config import WorkerConfig
from workers.engine.blocks import OutOfBlocks
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.prefix_fetch import PrefixFetch
from workers.errors import UnknownSequence, WorkerError
from workers.log_fields import log_fields, log_request
from workers.request import MIXED_KV, FetchedOut, Request
from workers.stats import NO_PULLS
from workers.transfer.peer_links import PeerLinks

logger = logging.getLogger(__name__)


class _PrefixOrder:
    """The `ReadOrder` of a prefix: the engine chooses. Calls `changed` when a part of it has arrived."""

    def __init__(self, engine: Engine, fetch: PrefixFetch, changed: Callable[[], None]) -> None:
        self._engine = engine
        self._fetch = fetch
        self._changed = changed

    @property
    def is_done(self) -> bool:
        return self._fetch.is_done

    def take(self, ready_tokens: int) -> tuple[int, int] | None:
        return self._engine.prefix_fetches.take(self._fetch, ready_tokens, now_s())

    def completed(self, first_token: int) -> None:
        self._engine.prefix_fetches.completed(self._fetch, first_token, now_s())
        self._changed()


class KVFetcher:
    """Owned by a Worker. Close it before the peer links.

    Calls `arrived` when the KV of a reservation is here, and `changed` when blocks become free or used.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        executor: Executor,
        peer_links: PeerLinks,
        arrived: Callable[[FetchedOut], None],
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._executor = executor
        self._peer_links = peer_links
        self._arrived = arrived
        self._changed = changed
        self.fetches: dict[str, asyncio.Task[None]] = {}  # for reservations, by key
        self._prefix_fetches: dict[str, asyncio.Task[None]] = {}  # by the key of the request that asked
        self.pulls = NO_PULLS

    def fetch(self, key: str, ticket: TransferTicket, *, starts_decoding: bool) -> None:
        """Begin to pull a ticket's KV into the blocks of a reservation. If that fails, so does the sequence.

        See `Reservations.fetched` for `starts_decoding`. Raises `WorkerError` if it has begun before.
        """
        if key in self.fetches:
            raise WorkerError(f"{key} is being fetched already")
        task = self.fetches[key] = asyncio.ensure_future(self._fetch(key, ticket, starts_decoding))
        task.add_done_callback(lambda _: self.fetches.pop(key, None))

    async def _fetch(self, key: str, ticket: TransferTicket, starts_decoding: bool) -> None:
        try:
            sequence, num_tokens = self._engine.reservations.get(key), ticket.num_tokens
            size = self._config.engine.block_size
            if num_tokens > sequence.request.num_tokens:
                raise TransferError(f"the ticket holds {num_tokens} tokens, {key} has {sequence.request.num_tokens}")
            if self.is_rounded(ticket) and not sequence.kv_dtype:
                sequence.kv_dtype = MIXED_KV  # not known at reservation; keeps its blocks out of the prefix cache
            skip_tokens = min(sequence.cached_tokens, num_tokens)
            first, stop = covering(size, skip_tokens, num_tokens - skip_tokens)
            report = await self.pull(ticket, tuple(sequence.blocks[first:stop]), skip_tokens)
            self._engine.reservations.fetched(key, now_s(), num_tokens=num_tokens, starts_decoding=starts_decoding)
            self._arrived(FetchedOut(key, report))
            message = "%d bytes of KV arrived from %s over %s in %.1f ms"
            seen = report.num_bytes, ticket.owner.worker, report.transport, 1e3 * report.elapsed_s
            log_request(logger, self._config.name, key, message, *seen)
        except (TransferError, UnknownSequence) as error:
            kinds = {"corrupt": isinstance(error, DigestMismatch), "unlinked": isinstance(error, Unlinked)}
            self._engine.sequences.fail(key, f"{type(error).__name__}: {error}", **kinds)
        except Exception as error:
            fields = log_fields(self._config.name, key)
            logger.exception("worker %s: fetching the KV of %s failed", self._config.name, key, extra=fields)
            self._engine.sequences.fail(key, f"unexpected {type(error).__name__}: {error}")
        self._changed()

    async def pull(
        self, ticket: TransferTicket, blocks: tuple[int, ...], skip_tokens: int, order: ReadOrder | None = None
    ) -> TransferReport:
        """Pull the ticket's KV after `skip_tokens` into these blocks, or as much as `order` asks for.

        Errors: `TransferError`.
        """
        try:
            client, link = await self._meet(ticket.owner)
            ours = tuple([(shard.layout, shard.rank) for shard in self._executor.shards()])
            report = await pull(
                client,
                self._read,
                ticket,
                blocks,
                link=link,
                read_timeout_s=self._config.transfer.read_timeout_s,
                block_size=self._config.engine.block_size,
                pieces=union_of_pieces(tuple([shard.layout for shard in ticket.owner.shards]), ours),
                skip_tokens=skip_tokens,
                order=order,
            )
        except TransferError as error:
            if isinstance(error, PeerLost):
                self._peer_links.unlink(ticket.owner.incarnation)
            self.pulls = self.pulls.failure(corrupt=isinstance(error, DigestMismatch))
            raise
        self.pulls = self.pulls.arrival(report)
        return report

    async def _meet(self, owner: PeerAddress) -> tuple[ControlClient, LinkReport]:
        try:
            return await self._peer_links.meet(owner)
        except TransferError as error:
            raise Unlinked(f"{type(error).__name__}: {error}") from error

    async def fetch_prefix(self, request: Request, ticket: TransferTicket, timeout_s: float) -> int:
        """Begin to pull the ticket's prefix into our cache; returns how many tokens of it are coming.

        A prompt with this prefix takes what has arrived, and computes the rest. The pull ends within `timeout_s`,
        whatever has arrived by then. 0 without room or for another dtype: the prompt is then computed, which only
        costs time. Raises `Unlinked`.
        """
        tokens = (*request.prompt, *request.generated)[: ticket.num_tokens]
        if self.is_rounded(ticket):
            return 0  # converted KV is rounded, so it differs from what this worker computes
        try:
            async with asyncio.timeout(timeout_s):
                _, link = await self._meet(ticket.owner)
        except TimeoutError:
            return 0
        self.cancel(request.key)
        try:
            fetch = self._engine.prefix_fetches.begin(
                tokens,
                request.cache_salt,
                now_s(),
                owner=ticket.owner.incarnation,
                owner_size=ticket.owner.shards[0].layout.block_size,
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
            )
        except OutOfBlocks:
            return 0
        task = asyncio.ensure_future(self._follow(fetch, ticket, timeout_s))
        self._prefix_fetches[request.key] = task
        task.add_done_callback(lambda ended: self._ended(request.key, ended, fetch))
        return ticket.num_tokens

    async def _follow(self, fetch: PrefixFetch, ticket: TransferTicket, timeout_s: float) -> None:
        """Wait until all that is wanted of the prefix has arrived."""
        skip_tokens = fetch.num_shared * self._config.engine.block_size
        order = _PrefixOrder(self._engine, fetch, self._changed)
        try:
            async with asyncio.timeout(timeout_s):
                await self.pull(ticket, fetch.blocks[fetch.num_shared :], skip_tokens, order)
        except (TransferError, TimeoutError) as error:
            reason = str(error) or f"it took longer than {timeout_s:.1f} s"
            logger.warning("worker %s: could not fetch a prefix: %s", self._config.name, reason)
        except Exception:
            logger.exception("worker %s: fetching a prefix failed", self._config.name)

    def _ended(self, key: str, task: "asyncio.Task[None]", fetch: PrefixFetch) -> None:
        if self._prefix_fetches.get(key) is task:
            del self._prefix_fetches[key]
        self._engine.prefix_fetches.end(fetch)
        self._changed()

    def cancel(self, key: str) -> None:
        """Stop what is fetched for this request. What has arrived of a prefix stays."""
        for task in (self.fetches.get(key), self._prefix_fetches.get(key)):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Cancel all fetches."""
        tasks = [*self.fetches.values(), *self._prefix_fetches.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def is_rounded(self, ticket: TransferTicket) -> bool:
        """Whether the owner's KV has another dtype than ours."""
        return ticket.owner.shards[0].layout.dtype != self._executor.shards()[0].layout.dtype

    def _read(self, order: PullOrder) -> Read:
        read = self._executor.pull(order)
        self._engine.pool.begin_transfer(order.target_blocks)
        read.settled.add_done_callback(lambda _: self._settled(order.target_blocks))
        return read

    def _settled(self, blocks: tuple[int, ...]) -> None:
        self._engine.pool.end_transfer(blocks)
        self._changed()
