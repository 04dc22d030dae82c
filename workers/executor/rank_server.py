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
from workers.model.folder import ModelFolder

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0  # until the last rank of the gang has joined
END_TIMEOUT_S = 5.0
LEADER_SILENT_S = 30.0  # a leader beats every second, but may be stopped for a while by its own machine


async def serve_rank(order: RankOrder, find: Callable[[str], ModelFolder], shared: SharedMemory | None = None) -> None:
    """Until the leader says Close, or has gone; then nothing of the rank is left.

    `find` answers the folder of a model's name on this machine. Raises `PeerRefused` when the leader does not know the
    gang's secret; an error at opening is told to the leader.
    """
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(order.leader_host, order.leader_port)
    channel = Channel(reader, writer)
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            await _join(channel, order)
            await _receive(channel, wire.Open)
        rank = await _open(channel, order, find, shared)
        if rank is not None:
            await _Service(channel, rank).run()
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


async def _open(
    channel: Channel, order: RankOrder, find: Callable[[str], ModelFolder], shared: SharedMemory | None
) -> Rank | None:
    """None: it could not, and the leader knows why."""
    try:
        folder = await asyncio.to_thread(find, order.config.model)
        _, rank = await open_rank(order.config, folder, order.incarnation, shared, order.seat)
    except Exception as error:
        logger.exception("rank %d of %s cannot open", order.seat.rank, order.config.name)
        channel.send(wire.failed(0, error))
        await channel.drain()
        return None
    channel.send(wire.Opened(rank.shard()))
    return rank


class _Service:
    """Frames in, answers out. Plans are begun in the order of their frames; everything else runs beside them."""

    def __init__(self, channel: Channel, rank: Rank) -> None:
        self._channel = channel
        self._rank = rank
        self._shard: ShardAddress = rank.shard()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        beating = asyncio.ensure_future(self._beat())
        closing: wire.Close | None = None
        try:
            while closing is None:
                async with asyncio.timeout(LEADER_SILENT_S):
                    data = await self._channel.receive(wire.FRAME_BYTES)
                frame = msgspec.msgpack.decode(data, type=wire.ToRank)
                if isinstance(frame, wire.Close):
                    closing = frame
                else:
                    self._begin(frame)
        finally:
            beating.cancel()
            await self._rank.close()
            if self._tasks:
                await asyncio.wait(self._tasks)
        self._channel.send(wire.Done(closing.number))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(wire.BEAT_S)
            self._channel.send(wire.Alive())

    def _begin(self, frame: wire.ToRank) -> None:
        rank = self._rank
        match frame:
            case wire.Execute(number, plan):
                self._run(number, rank.execute(plan), lambda step: wire.Stepped(number, step))
            case wire.Connect(number, peer):
                self._run(number, rank.connect(peer), lambda report: wire.Connected(number, report))
            case wire.Forget(number, incarnation):
                self._run(number, rank.forget(incarnation), lambda _: wire.Done(number))
            case wire.Pull(number, order):
                read = rank.pull(order)
                self._run(number, read.done, lambda stats: wire.Pulled(number, stats))
                read.settled.add_done_callback(lambda _: self._channel.send(wire.Settled(number)))

    def _run(self, number: int, work: Awaitable[Any], answer: Callable[[Any], msgspec.Struct]) -> None:
        task = asyncio.ensure_future(self._answer(number, work, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, work: Awaitable[Any], answer: Callable[[Any], msgspec.Struct]) -> None:
        try:
            frame = answer(await work)
        except Exception as error:
            frame = wire.failed(number, error)
        self._channel.send(frame)
        shard = self._rank.shard()
        if shard != self._shard:
            self._shard = shard
            self._channel.send(wire.Moved(shard))


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
        _, running = await asyncio.wait(self._tasks, timeout=END_TIMEOUT_S)
        for task in running:
            task.cancel()
