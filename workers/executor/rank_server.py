"""One rank of a gang: connects to its leader, loads its part, and serves the leader's calls until it disconnects.

Runs in the process or task that a `RankLauncher` started. Knows one rank and one connection; knows no schedule.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import structs

from kvtransfer.open import SharedMemory
from kvtransfer.rpc.connection import RpcConnection, observe
from kvtransfer.rpc.frames import BROKEN, FrameStream, greet
from kvtransfer.rpc.handshake import CallerHandshake
from kvtransfer.rpc.methods import answer
from kvtransfer.ticket import ShardAddress, rank_name
from kvtransfer.transport import PullOrder, ReadStats
from workers.engine.executor import SpanQuery
from workers.engine.step import RemoteKV
from workers.executor import gang_wire as wire
from workers.executor.rank import Rank
from workers.executor.rank_loader import close_opened, open_rank
from workers.executor.rank_spec import RankSpec
from workers.model.folder import ModelFolder

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0  # to reach the leader
END_TIMEOUT_S = 3.0  # for the reads in flight to settle; the process may exit before that
LEADER_SILENT_S = 30.0  # a leader sends a message every second, but its machine may stall


async def serve_rank(spec: RankSpec, find: Callable[[str], ModelFolder], shared: SharedMemory | None = None) -> None:
    """Serve until the leader disconnects, then close the rank. A load or read that does not end in time is left to the
    end of the process.

    `find` returns the folder of a model's name on this machine. Raises `PeerRefused` when the leader has another secret
    or doesn't expect this rank; an error at opening goes to the leader.
    """
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        stream = await FrameStream.connect(spec.leader_host, spec.leader_port)
    try:
        async with asyncio.timeout(LEADER_SILENT_S):
            await _join(stream, spec)
        await _Service(stream, spec, find, shared).run()
    except (*BROKEN, TimeoutError) as error:
        logger.info("rank %d of %s ends: its leader disconnected (%s)", spec.rendezvous.rank, spec.config.name, error)
    finally:
        await stream.close()


async def _join(stream: FrameStream, spec: RankSpec) -> None:
    secret, leader = spec.config.secret.encode(), f"the leader at {spec.leader_host}:{spec.leader_port}"
    target = rank_name(spec.incarnation, spec.rendezvous.rank)
    await greet(stream, CallerHandshake(wire.GANG_PROTOCOL.name, secret, target, leader))


class _Service:
    """The rank's side of the connection."""

    def __init__(
        self, stream: FrameStream, spec: RankSpec, find: Callable[[str], ModelFolder], shared: SharedMemory | None
    ) -> None:
        self._spec = spec
        self._find = find
        self._shared = shared
        self._opening: asyncio.Task[Rank] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._shard: ShardAddress | None = None  # as the leader knows it
        self._connection = RpcConnection(
            stream, wire.GANG_PROTOCOL, "the leader", on_call=self._on_call, on_message=self._on_message
        )

    async def run(self) -> None:
        self._connection.keep_alive(self._status, LEADER_SILENT_S)
        try:
            await self._connection.run()
        finally:
            await self._end(whole=False)
            await self._connection.close()

    async def _on_call(self, request: msgspec.Struct) -> Any:
        """Calls start in the order in which they arrive, so plans do too."""
        match type(request).__name__:
            case "open":
                return await self._open()
            case "pull":
                return await self._pull(*structs.astuple(request))
            case "close":
                return await self._end(whole=True)
        return await answer(self._rank, request)

    def _on_message(self, message: wire.ForgetBlocks | wire.Alive) -> None:
        if isinstance(message, wire.ForgetBlocks):
            self._rank.caches[message.tier].forget(message.block_hashes)

    async def _open(self) -> ShardAddress:
        assert self._opening is None, "opened twice"
        self._opening = asyncio.ensure_future(self._load())
        self._opening.add_done_callback(observe)
        rank = await asyncio.shield(self._opening)
        self._shard = rank.shard()
        return self._shard

    async def _load(self) -> Rank:
        spec = self._spec
        try:
            folder = await asyncio.to_thread(self._find, spec.config.model)
            rank = await open_rank(spec.config, folder, spec.incarnation, self._shared, spec.rendezvous)
        except Exception:
            logger.exception("rank %d of %s failed to load", spec.rendezvous.rank, spec.config.name)
            raise
        for each in rank.caches.values():
            each.watch(lambda block_hash, prefix: None, lambda block_hash: None)  # it learns what others store
        rank.borrow(self._ask_lender)
        return rank

    async def _ask_lender(self, span: RemoteKV, query: SpanQuery) -> bytes:
        state: bytes = await self._connection.begin(wire.CALLS["ask_lender"](span, query))
        return state

    async def _pull(self, number: int, order: PullOrder) -> ReadStats:
        read = self._rank.pull(order)
        read.settled.add_done_callback(lambda _: self._connection.notify(wire.Settled(number)))
        return await asyncio.shield(read.done)

    @property
    def _rank(self) -> Rank:
        """Raises if the leader did not wait for `Open`."""
        assert self._opening is not None, "a call before Open"
        return self._opening.result()

    def _status(self) -> wire.Moved | wire.Alive:
        """Sent every second. A rebuilt transport has a new address."""
        if self._shard is None or self._ending is not None:
            return wire.Alive()
        if (shard := self._rank.shard()) == self._shard:
            return wire.Alive(self._rank.ticks)
        self._shard = shard
        return wire.Moved(shard)

    async def _end(self, whole: bool) -> None:
        """`whole`: the other ranks are alive until this one has closed, so it need not abort its collectives."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._close(whole))
        await asyncio.shield(self._ending)

    async def _close(self, whole: bool) -> None:
        if self._opening is None:
            return
        closing = asyncio.ensure_future(close_opened(self._opening, whole))
        _, running = await asyncio.wait([closing], timeout=END_TIMEOUT_S)
        if running:
            logger.warning(
                "rank %d of %s exits before its reads or its load have ended",
                self._spec.rendezvous.rank,
                self._spec.config.name,
            )


class RankTasks:
    """`RankLauncher` in this process: each rank is a task of this loop with its own compute thread."""

    def __init__(self, find: Callable[[str], ModelFolder], shared: SharedMemory | None = None) -> None:
        self._find = find
        self._shared = shared
        self._tasks: list[asyncio.Task[None]] = []

    def launch(self, specs: Sequence[RankSpec]) -> Sequence[Awaitable[Any]]:
        self._tasks = [asyncio.ensure_future(serve_rank(spec, self._find, self._shared)) for spec in specs]
        return self._tasks

    async def end(self) -> None:
        """Ranks exit when their leader disconnects; one that does not is cancelled after a timeout."""
        if not self._tasks:
            return
        _, running = await asyncio.wait(self._tasks, timeout=2 * END_TIMEOUT_S)
        for task in running:
            task.cancel()
