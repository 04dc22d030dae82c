"""One rank of a gang on its own: calls its leader, opens, and does what the leader's frames say until that hangs up.

Runs in whatever process or task a `RankLauncher` made for it. Knows one rank and one connection; knows no schedule.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from kvtransfer.challenge import nonce, proof, proves
from kvtransfer.control_wire import BROKEN, Channel
from kvtransfer.errors import PeerRefused
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import ShardAddress
from workers.executor import gang_wire as wire
from workers.executor.opening import open_rank
from workers.executor.order import RankOrder
from workers.executor.rank import Rank
from workers.executor.remote_rank import observe
from workers.model.folder import ModelFolder

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0  # to reach the leader
END_TIMEOUT_S = 3.0  # for the reads in flight to settle; a process may end without that
LEADER_SILENT_S = 30.0  # a leader beats every second, but may be stopped for a while by its own machine


async def serve_rank(order: RankOrder, find: Callable[[str], ModelFolder], shared: SharedMemory | None = None) -> None:
    """Until the leader says Close, or has gone; then nothing of the rank is left, or whatever it still waits for ends
    without it: a load that is under way, reads that may still land.

    `find` answers the folder of a model's name on this machine. Raises `PeerRefused` when the leader does not know the
    gang's secret; an error at opening is told to the leader.
    """
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(order.leader_host, order.leader_port)
    channel = Channel(reader, writer)
    try:
        async with asyncio.timeout(LEADER_SILENT_S):
            await _join(channel, order)
        await _Service(wire.Line(channel, LEADER_SILENT_S), order, find, shared).run()
    except (*BROKEN, TimeoutError) as error:
        logger.info("rank %d of %s ends: its leader hung up (%s)", order.seat.rank, order.config.name, error)
    finally:
        await channel.close()


async def _join(channel: Channel, order: RankOrder) -> None:
    """The rank's half of the handshake."""
    hello = await _receive(channel, wire.Hello)
    ours, secret = nonce(), order.config.secret.encode()
    bound = wire.seat_name(order.incarnation, order.seat.rank)
    channel.send(wire.Join(order.seat.rank, ours, proof(secret, b"gang rank", hello.nonce, ours, bound)))
    welcome = await _receive(channel, wire.Welcome)
    if not proves(welcome.proof, proof(secret, b"gang leader", hello.nonce, ours, bound)):
        raise PeerRefused(f"whoever listens at {order.leader_host}:{order.leader_port} is not the leader of this gang")


async def _receive(channel: Channel, kind: type[Any]) -> Any:
    return msgspec.msgpack.decode(await channel.receive(wire.STRANGER_BYTES), type=kind)


class _Service:
    """Frames in, answers out. Plans are begun in the order of their frames; everything else runs beside them."""

    def __init__(
        self, line: wire.Line, order: RankOrder, find: Callable[[str], ModelFolder], shared: SharedMemory | None
    ) -> None:
        self._line = line
        self._order = order
        self._find = find
        self._shared = shared
        self._opening: asyncio.Task[Rank] | None = None
        self._shard: ShardAddress | None = None  # as the leader knows it
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        beating = asyncio.ensure_future(self._line.beat(self._news))
        closing: wire.Close | None = None
        try:
            while closing is None:
                frame = await self._line.receive(wire.ToRank)
                if isinstance(frame, wire.Close):
                    closing = frame
                else:
                    self._begin(frame)
        finally:
            beating.cancel()
            await self._end(whole=closing is not None)
        self._line.send(wire.Done(closing.number))

    async def _end(self, whole: bool) -> None:
        """`whole`: the other ranks are there until we have closed, and nobody needs to be let go."""
        if self._opening is None:
            return
        ending = asyncio.ensure_future(self._close(self._opening, whole))
        _, running = await asyncio.wait([ending], timeout=END_TIMEOUT_S)
        if running:
            logger.warning(
                "rank %d of %s ends before its reads or its loading do", self._order.seat.rank, self._order.config.name
            )

    async def _close(self, opening: "asyncio.Task[Rank]", whole: bool) -> None:
        await asyncio.wait([opening])
        if opening.cancelled() or opening.exception() is not None:
            return
        rank = opening.result()
        if not whole:
            rank.abort()
        await rank.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _news(self) -> wire.Moved | wire.Alive:
        """What a beat says: a transport that was rebuilt has a new address."""
        if self._shard is None:
            return wire.Alive()
        if (shard := self._rank.shard()) == self._shard:
            return wire.Alive(self._rank.ticks)
        self._shard = shard
        return wire.Moved(shard)

    @property
    def _rank(self) -> Rank:
        """Raises when the leader did not wait until it is open."""
        assert self._opening is not None, "a call before Open"
        return self._opening.result()

    async def _open(self) -> Rank:
        """Tells the leader how it went."""
        order = self._order
        try:
            folder = await asyncio.to_thread(self._find, order.config.model)
            _, rank = await open_rank(order.config, folder, order.incarnation, self._shared, order.seat)
        except Exception as error:
            logger.exception("rank %d of %s cannot open", order.seat.rank, order.config.name)
            self._line.send(wire.failed(0, error))
            raise
        self._shard = rank.shard()
        self._line.send(wire.Opened(self._shard))
        return rank

    def _begin(self, frame: wire.ToRank) -> None:
        match frame:
            case wire.Open() if self._opening is None:
                self._opening = asyncio.ensure_future(self._open())
                self._opening.add_done_callback(observe)
            case wire.Execute(number, plan):
                self._run(number, self._rank.execute(plan), lambda step: wire.Stepped(number, step))
            case wire.Connect(number, peer):
                self._run(number, self._rank.connect(peer), lambda report: wire.Connected(number, report))
            case wire.Forget(number, incarnation):
                self._run(number, self._rank.forget(incarnation), lambda _: wire.Done(number))
            case wire.Pull(number, order):
                read = self._rank.pull(order)
                self._run(number, read.done, lambda stats: wire.Pulled(number, stats))
                read.settled.add_done_callback(lambda _: self._line.send(wire.Settled(number)))

    def _run(self, number: int, work: Awaitable[Any], answer: Callable[[Any], msgspec.Struct]) -> None:
        task = asyncio.ensure_future(self._answer(number, work, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, work: Awaitable[Any], answer: Callable[[Any], msgspec.Struct]) -> None:
        try:
            frame = answer(await work)
        except Exception as error:
            frame = wire.failed(number, error)
        self._line.send(frame)


class RankTasks:
    """`RankLauncher` in this process: every rank a task of this loop with a compute thread of its own."""

    def __init__(self, find: Callable[[str], ModelFolder], shared: SharedMemory | None = None) -> None:
        self._find = find
        self._shared = shared
        self._tasks: list[asyncio.Task[None]] = []

    def launch(self, orders: Sequence[RankOrder]) -> Sequence[Awaitable[Any]]:
        self._tasks = [asyncio.ensure_future(serve_rank(order, self._find, self._shared)) for order in orders]
        return self._tasks

    async def end(self) -> None:
        """They end by themselves when their leader has hung up; one that does not is cancelled after a while."""
        if not self._tasks:
            return
        _, running = await asyncio.wait(self._tasks, timeout=2 * END_TIMEOUT_S)
        for task in running:
            task.cancel()
