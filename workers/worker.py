"""A worker: one engine, one executor, one lease server, and the calls that a dispatcher makes.

The async shell around the engine. It translates calls into engine methods, runs fetches, serves the readers of its
leases, and keeps a mailbox for each subscriber. It has no role: prefill, decode and colocated requests share the code.

    prefill                       compute a prompt, hold its KV for a reader
    reserve -> fetch -> decode    fetch that KV, and decode
    generate                      both, on one worker
    offer_migration               offer the KV of a running decode to another worker (migration)
    cancel                        end any of them, at any time, idempotent
"""

import asyncio
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import chain

import psutil

from diptych.clock import now_s
from diptych.shapes import Shape, Timings
from kvtransfer.open import RESERVED_BLOCKS
from kvtransfer.ticket import LinkReport, PeerAddress, TransferTicket
from workers.config import WorkerConfig
from workers.engine.adapter_cache import AdapterCache
from workers.engine.engine import Engine, EngineOutput
from workers.engine.engine_loop import EngineLoop
from workers.engine.executor import Executor
from workers.engine.kv_event_log import Tier
from workers.engine.multi_step import MultiStep
from workers.engine.reservation_queue import ReservationQueue
from workers.engine.sequence import Lease
from workers.engine.step_timing import measure
from workers.errors import InvalidRequest, Overloaded, UnknownSequence, WorkerClosed, WorkerError
from workers.kv_events import KVEvents
from workers.log_fields import log_request
from workers.request import DeferredReader, EngineOutputs, FailedOut, Output, Request, Reservation, TicketOut
from workers.stats import WorkerInfo, WorkerStats
from workers.subscribers import Subscribers
from workers.transfer.kv_borrower import KVBorrower
from workers.transfer.kv_fetcher import KVFetcher
from workers.transfer.kv_lender import KVLender
from workers.transfer.lease_server import LeaseServer
from workers.transfer.peer_links import PeerLinks

logger = logging.getLogger(__name__)

REMEMBERED_CANCELS = 4096  # a cancel may arrive before the call that it cancels
SWEEP_S = 0.5
MAX_LATE_SWEEPS = 8  # late sweeps in a row that expire nothing; a loop that is always late must still reclaim


@dataclass(slots=True)
class _Warming:
    """A prompt that is computed for the cache alone."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""


class Worker:
    """Its engine runs as soon as it is constructed. Owned by a `WorkerServer`; uses one event loop."""

    def __init__(self, config: WorkerConfig, incarnation: str, executor: Executor, *, heartbeat_s: float) -> None:
        facts, stores = executor.facts, executor.stores(self._changed)
        if not config.engine.kv_blocks:
            config = replace(config, engine=replace(config.engine, kv_blocks=facts.kv_blocks))
        if config.engine.dtype == "auto":
            config = replace(config, engine=replace(config.engine, dtype=facts.layout.dtype))
        self.config = config
        self.incarnation = incarnation
        self.engine = Engine(
            config.engine,
            facts,
            config.transfer,
            reserved=RESERVED_BLOCKS,
            cost=config.cost,
            prefix_tokens=config.prefix_tokens,
            depth=executor.depth,
            max_pinned=config.cache.pins // facts.layout.block_bytes,
            stores=stores,
        )
        self._stores = {each.tier: each for each in stores}
        self._executor = executor
        self._peer: PeerAddress | None = None  # the latest address
        self._failure: str | None = None
        self._closed = False
        self._subscribers = Subscribers(self._stats, self._require_open, self._subscriber_left, heartbeat_s)
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._warming: dict[str, _Warming] = {}  # by sequence key
        self._measurements: set[asyncio.Task[Timings]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep_due_s = 0.0
        self._late_sweeps = 0  # in a row: they expire nothing
        self._reservations = ReservationQueue(self.engine, self._subscribers.add)
        self._adapters = AdapterCache(executor, config.cache.adapters, self._adapters_in_use)
        self._peer_links = PeerLinks(config, executor)
        self._kv_fetcher = KVFetcher(
            config, self.engine, executor, self._peer_links, self._subscribers.post, self._changed
        )
        loop_time = asyncio.get_running_loop().time
        self._multi_step = MultiStep(
            self.engine, executor, self._subscribers.deferred_reader, self._stats, loop_time, heartbeat_s
        )
        self._engine_loop = EngineLoop(self.engine, executor, self._deliver, loop_time, self._multi_step)
        self._lender = KVLender(config, self.engine, executor, self._kv_fetcher, self._ticket, self._changed)
        self._borrower = KVBorrower(
            config, self.engine, executor, self._peer_links, self._kv_fetcher, self._ticket, self._changed
        )
        self._leases = LeaseServer(
            config,
            lambda: self.engine.leases,
            executor,
            self._peer_now,
            self._changed,
            self._engine_loop.wake,
            self._lender,
        )
        self._running_loop = asyncio.ensure_future(self._engine_loop.run())
        self._running_loop.add_done_callback(self._loop_ended)
        self._watching = asyncio.ensure_future(self._watch())

    @classmethod
    async def open(cls, config: WorkerConfig, incarnation: str, executor: Executor, *, heartbeat_s: float) -> "Worker":
        """Open a worker with its lease server. Takes over the executor. Raises OSError if it cannot listen."""
        worker = cls(config, incarnation, executor, heartbeat_s=heartbeat_s)
        try:
            await worker._leases.listen()
        except OSError:
            await worker.close()
            raise
        return worker

    # ---- lifecycle -------------------------------------------------------------------------------------------

    def _peer_now(self) -> PeerAddress:
        """Our address for peers; a rebuilt transport changes it."""
        shards = self._executor.shards()
        if self._peer is None or self._peer.shards != shards:
            self._peer = PeerAddress(
                worker=self.config.name,
                incarnation=self.incarnation,
                host=self.config.transfer.host,
                control_port=self._leases.port,
                shards=shards,
            )
        return self._peer

    async def info(self) -> WorkerInfo:
        """The worker's identity, model and present memory use."""
        self._require_open()
        facts = self._executor.facts
        disk, remote = self._stores.get(Tier.DISK), self._stores.get(Tier.REMOTE)
        return WorkerInfo(
            name=self.config.name,
            node=socket.gethostname(),
            pid=os.getpid(),
            peer=self._peer_now(),
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            capacity_tokens=self.engine.max_length,
            memory_bytes=psutil.Process().memory_info().rss,
            tokenizer=facts.tokenizer,
            default_sampling=facts.default_sampling,
            disk_byte_s=0.0 if disk is None else disk.read_byte_s,
            remote_byte_s=0.0 if remote is None else remote.read_byte_s,
            remote_store="" if remote is None else remote.shared_as,
        )

    def _loop_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mark_unhealthy(error)

    async def _watch(self) -> None:
        """Notice a device that is lost while it is idle."""
        self._mark_unhealthy(await self._executor.failure())

    def _mark_unhealthy(self, error: BaseException) -> None:
        """Refuse every call from now on, and end subscriptions; the controller replaces this worker."""
        if self._failure is not None or self._closed:
            return
        self._failure = f"the engine stopped: {type(error).__name__}: {error}"
        logger.error("worker %s: %s", self.config.name, self._failure, exc_info=error)
        self._end_warming()
        self._subscribers.wake()

    async def close(self) -> None:
        """End every sequence and fetch, then free the memory once nothing writes to it."""
        self._closed = True
        self._end_warming()
        for key in list(self._subscribers.routes):
            self._forget(key)
        self._engine_loop.stop()
        await asyncio.wait([self._running_loop, *self._measurements])
        await self._kv_fetcher.close()
        await self._borrower.close()
        self._watching.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._subscribers.close()
        await self._peer_links.close()
        await self._leases.close()
        await self._executor.close()

    async def disconnect(self) -> None:
        """A caller leaves. In one process there is no connection to close."""

    # ---- the calls of a dispatcher ---------------------------------------------------------------------------

    async def prefill(self, request: Request, cut_tokens: int = 0) -> None:
        """Compute the prompt and its next token, and hold the KV for a reader. Outputs: TicketOut, TokensOut.

        `cut_tokens`: only the KV of this many tokens; the reader computes the rest. Outputs: TicketOut, HeadOut.
        """
        await self._accept_to_sample(request)
        self._add(request, hold=True, cut_tokens=cut_tokens)
        self._log(request.key, "prefill of %d tokens, for another worker", cut_tokens or request.num_tokens)

    async def generate(self, request: Request, lenders: tuple[PeerAddress, ...] = ()) -> None:
        """Compute the prompt and decode, all here. Outputs: TokensOut.

        With `lenders` it may be longer than our pool: its blocks move to these workers, and we attend to them there.
        """
        if lenders and self._executor.facts.layout.state_layers:
            most = f"this worker's memory has room for {self.engine.max_length} tokens"
            raise InvalidRequest("prompt", f"{most}, and linear attention cannot borrow other workers' memory")
        await self._accept_to_sample(request)
        if lenders:
            self._borrower.add(request.key, lenders)
        self._add(request, hold=False, borrows=bool(lenders))
        self._log(request.key, "prefill of %d tokens, and decode", request.num_tokens)

    async def reserve(self, request: Request, timeout_s: float) -> Reservation:
        """Wait, first come first served, for blocks and a slot. Raises `Overloaded` after `timeout_s`."""
        await self._accept_to_sample(request)
        reserving = self._reservations.ask(request, timeout_s)
        self._arm()
        reservation = await reserving
        self._log(request.key, "room for %d tokens is reserved", request.num_tokens)
        return reservation

    async def fetch(self, key: str, ticket: TransferTicket | None, starts_decoding: bool = False) -> None:
        """Pull the ticket's KV into the reserved blocks, behind its watermark. Outputs: FetchedOut or FailedOut.

        Without a ticket there is nothing to fetch and no such output. `starts_decoding`: then compute the rest of the
        prompt and sample, without waiting for `decode`. Outputs: TokensOut too.
        """
        self._require_open()
        self.engine.reservations.begin_fetch(key)
        if ticket is None:
            self.engine.reservations.fetched(key, now_s(), num_tokens=0, starts_decoding=starts_decoding)
            return self._changed()
        self._kv_fetcher.fetch(key, ticket, starts_decoding=starts_decoding)

    async def decode(self, key: str, tokens: tuple[int, ...]) -> None:
        """Decode after these tokens, generated elsewhere, once the KV is here. Outputs: TokensOut."""
        self._require_open()
        self.engine.reservations.decode(key, tokens, now_s())
        self._changed()
        self._log(key, "decode after %d tokens computed elsewhere", len(tokens))

    async def offer_migration(self, key: str, most_tokens: int) -> TransferTicket | None:
        """Hold the KV of at most the first `most_tokens` tokens of a running sequence for another worker.

        It continues here until it is cancelled. None: it was preempted or has no full block. Raises `UnknownSequence`.
        """
        self._require_open()
        lease = self.engine.sequences.offer_migration(key, most_tokens, now_s())
        self._arm()
        return None if lease is None else self._ticket(lease)

    async def hold_prefix(self, request: Request) -> TransferTicket | None:
        """Hold the cached part of this prompt's prefix for one reader. None: there is none that it could read."""
        self._accept(request)
        tokens = (*request.prompt, *request.generated)
        lease = self.engine.prefix_fetches.hold(f"{request.key}:prefix", tokens, now_s(), request.cache_salt)
        self._arm()
        return None if lease is None else self._ticket(lease)

    async def fetch_prefix(self, request: Request, ticket: TransferTicket, timeout_s: float) -> int:
        """Begin to pull a prefix that another worker holds into our cache, for `timeout_s` at most.

        Returns how many tokens of it are coming. What does not arrive is no error: the prompt computes it.
        """
        self._accept(request)
        return await self._kv_fetcher.fetch_prefix(request, ticket, timeout_s)

    async def warm(self, request: Request, ttl_s: float, timeout_s: float) -> int:
        """Compute a prompt, unless it is cached, without any output. Returns how many of its tokens are cached then.

        It is pinned until `ttl_s` after its last use (0: it is not). Raises `InvalidRequest`, `Overloaded` after
        `timeout_s` or beside too many other pins, and `WorkerError` if it failed.
        """
        self._accept(request)
        if ttl_s:
            self.engine.pin(request, ttl_s, now_s())
        self.engine.add(request, now_s(), hold=False)
        warming = self._warming[request.key] = _Warming()
        try:
            self._changed()
            self._arm()
            async with asyncio.timeout(timeout_s):
                await warming.ended.wait()
        except TimeoutError:
            raise Overloaded(f"the prompt was not computed within {timeout_s:g} s", retry_after_s=1.0) from None
        finally:
            del self._warming[request.key]
            self.engine.sequences.abort(request.key)
        self._require_open()
        if warming.failure:
            raise WorkerError(f"the prompt was not computed: {warming.failure}")
        return self.engine.cached_tokens(request)

    async def unpin(self, request: Request | None) -> int:
        """Returns how many tokens of this prompt, or in all, were pinned here."""
        self._require_open()
        return self.engine.unpin(request) * self.config.engine.block_size

    async def cache_since(self, last: int, reach: int) -> KVEvents:
        """Prefix cache changes for a reader at this position; (0, 0): a reader that knows nothing. See `KVEvents`."""
        self._require_open()
        return self.engine.pool.log.since(last, reach)

    async def cancel(self, key: str) -> None:
        """End all work for the key and free what it holds. Always succeeds."""
        self._cancelled[key] = None
        while len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        self._reservations.give_up(lambda each: each.key == key, "was cancelled while it waited for a reservation")
        self._kv_fetcher.cancel(key)
        self.engine.sequences.fail(key, "it was cancelled")
        self._changed()
        self._subscribers.routes.pop(key, None)

    async def holds(self, key: str) -> bool:
        """Whether the request of this key is still here: reserved, waiting, or running."""
        self._require_open()
        return self.engine.holds(key)

    async def subscribe(
        self,
        subscriber: str,
        on_outputs: Callable[[EngineOutputs], object],
        room: Callable[[], Awaitable[object]] | None = None,
        deferred: DeferredReader | None = None,
    ) -> None:
        """Send the outputs of this subscriber's requests, at most one message a step, and heartbeats between them.

        Runs until it is cancelled or the worker ends, and ends the requests. `room` returns when another message may be
        sent; meanwhile outputs are merged. `deferred` gets the tokens of steps that run as one. Raises `WorkerError`
        for a name in use, or when there was no room for `SUBSCRIBER_TIMEOUT_S`, and the errors of all calls.
        """
        self._require_open()

        def beat() -> None:
            if deferred is not None and self._multi_step.reports_to(deferred):  # the steps are its heartbeat
                deferred.on_deferred_heartbeat()
            else:
                on_outputs(EngineOutputs((), self._stats()))

        await self._subscribers.serve(subscriber, on_outputs, room, deferred, beat)

    async def connect(self, peer: PeerAddress) -> LinkReport:
        """Preflight: connect to an owner, move one real block with its digest, measure. Errors: `TransferError`."""
        self._require_open()
        _, link = await self._peer_links.meet(peer, measures=True)
        return link

    async def address(self) -> PeerAddress:
        """Where other workers reach this one."""
        self._require_open()
        return self._peer_now()

    async def check(self) -> None:
        """Prove that every block is accounted for. Raises AssertionError."""
        self._require_open()
        self.engine.check()

    async def measure(self, shape: Shape, repeats: int) -> Timings:
        """Time steps of this shape on an idle worker (`workers.engine.step_timing`). The caller may be cancelled.

        Errors: `InvalidRequest`, `Overloaded`.
        """
        self._require_open()
        steps = measure(self.engine, self._executor, self.config.engine, shape, repeats, self._is_wanted)
        measuring = asyncio.ensure_future(steps)
        self._measurements.add(measuring)
        measuring.add_done_callback(self._measured)
        return await asyncio.shield(measuring)

    def _is_wanted(self) -> bool:
        return self._closed or self.engine.has_work or bool(self._reservations)

    def _measured(self, task: "asyncio.Task[Timings]") -> None:
        self._measurements.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), TimeoutError):
            return self._mark_unhealthy(error)
        self._changed()  # a reservation may wait for the blocks

    # ---- internals -------------------------------------------------------------------------------------------

    def _log(self, key: str, message: str, *args: object) -> None:
        log_request(logger, self.config.name, key, message, *args)

    def _stats(self) -> WorkerStats:
        share = 0.0 if self._executor.depth == 1 else self._executor.bubble_share
        pulls = self._kv_fetcher.pulls
        return self.engine.stats(share, pulls, self._adapters.ids, self._borrower.stats())

    def _require_open(self) -> None:
        if self._failure is not None:
            raise WorkerError(self._failure)
        if self._closed:
            raise WorkerClosed(f"worker {self.config.name} is closing")

    def _accept(self, request: Request) -> None:
        self._require_open()
        if request.key in self._cancelled:
            raise UnknownSequence(f"{request.key} was cancelled before it arrived")

    async def _accept_to_sample(self, request: Request) -> None:
        """Its outputs have a subscriber, its grammar is compiled, and its adapter loaded."""
        self._accept(request)
        self._subscribers.require(request)
        if request.sampling.grammar is None and request.adapter is None:
            return
        if request.sampling.grammar is not None:
            await self._executor.prepare(request.sampling.grammar)
        if request.adapter is not None:
            await self._adapters.use(request.adapter)
        self._accept(request)  # it may have been cancelled meanwhile
        self._subscribers.require(request)

    def _adapters_in_use(self) -> set[str]:
        requests = chain(self.engine.requests(), self._reservations.requests())
        return {request.adapter.id for request in requests if request.adapter is not None}

    def _add(self, request: Request, *, hold: bool, cut_tokens: int = 0, borrows: bool = False) -> None:
        self.engine.add(request, now_s(), hold=hold, cut_tokens=cut_tokens, borrows=borrows)
        self._subscribers.add(request)
        self._changed()

    def _changed(self) -> None:
        """The engine's state changed: reservations may fit now, the engine loop may have work."""
        self._reservations.grant()
        self._deliver(self.engine.drain())
        self._engine_loop.wake()

    def _forget(self, key: str) -> None:
        self._subscribers.routes.pop(key, None)
        self._kv_fetcher.cancel(key)
        self.engine.sequences.abort(key)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Put the engine's outputs into mailboxes, wake the readers of leases, and grant reservations."""
        outputs = self._multi_step.with_deferred(outputs)
        for each in outputs:
            output: Output = TicketOut(each.key, self._ticket(each)) if isinstance(each, Lease) else each
            if isinstance(output, FailedOut) and output.key in self._warming:
                self._warming[output.key].failure = output.reason
            self._subscribers.post(output)
        for each in outputs:
            if self.engine.is_silent(each.key):
                self._subscribers.routes.pop(each.key, None)
        self._end_warming()
        self._borrower.start()
        self._leases.progressed()
        if self._reservations:
            self._reservations.grant()
        if self._sweeper is None:
            self._arm()

    def _end_warming(self) -> None:
        """Of prompts that the engine no longer holds, or all if it has stopped."""
        for key, warming in self._warming.items():
            if self._closed or self._failure is not None or not self.engine.holds(key):
                warming.ended.set()

    def _ticket(self, lease: Lease) -> TransferTicket:
        return TransferTicket(lease.key, lease.epoch, self._peer_now(), lease.blocks, lease.num_tokens, lease.ttl_s)

    # ---- reclaim -----------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Schedule a sweep while anything can expire."""
        can_stall = self._subscribers.can_stall and (self._subscribers.routes or self._reservations)
        pending = can_stall or self.engine.may_expire
        if self._sweeper is None and pending and not self._closed:
            self._sweep_due_s = now_s() + SWEEP_S
            self._sweeper = asyncio.get_running_loop().call_at(self._sweep_due_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = now_s()
        is_late = now - self._sweep_due_s > SWEEP_S
        self._late_sweeps = self._late_sweeps + 1 if is_late else 0
        if 0 < self._late_sweeps < MAX_LATE_SWEEPS:
            return self._arm()  # our own loop was blocked: read what arrived meanwhile first
        if self.engine.may_expire:
            self.engine.expire(now)
            self._changed()
        self._subscribers.expire(now)
        self._arm()

    def _subscriber_left(self, subscriber: str) -> None:
        """End everything that this subscriber asked for."""
        self._reservations.give_up(lambda each: each.reply_to == subscriber, f"{subscriber} does not listen any more")
        for key in self._subscribers.keys_of(subscriber):
            self._forget(key)
        if not self._closed:
            self._changed()
