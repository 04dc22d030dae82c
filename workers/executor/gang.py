"""The executor with several ranks: tensor and pipeline parallel, one process (or task) for each rank.

The leader lives in the worker's process, holds rank 0, and sends every plan to all ranks at once; each computes its
plans in the order in which they came, and the stages of a pipeline wait for one another's activations, not for us.

    Engine ──plan──> GangExecutor ──> rank 0 (here)
                          └─ Execute ──> ranks 1 .. n-1 (`rank_server`, wherever the launcher put them)

A rank that is lost takes the gang down: `failure` tells, every call fails, and the ranks that live end when their
connection to the leader does. Knows ranks and frames; does not know what runs them (`RankLauncher`) nor the schedule.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvtransfer.challenge import nonce, proof, proves, require_secret
from kvtransfer.control_wire import BROKEN, Channel
from kvtransfer.links import slowest
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read, ReadStats
from workers.config import WorkerConfig
from workers.engine.bubble import BubbleMeter
from workers.engine.executor import ModelFacts
from workers.engine.step import StepPlan, StepResult
from workers.errors import ModelError, RankLost
from workers.executor import gang_wire as wire
from workers.executor.opening import MEET_TIMEOUT_S, open_rank, warm_up
from workers.executor.order import RankLauncher, RankOrder, Seat
from workers.executor.rank import Rank, RankStep
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.shard import shard_of

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0  # for a rank's process to start and call; a busy machine imports for a minute
OPEN_TIMEOUT_S = 600.0  # for a rank to fetch and load its part of the model
SILENT_S = 5.0  # a rank beats every second
CLOSE_TIMEOUT_S = 5.0


class RemoteRank:
    """The leader's end of one rank. Calls are numbered; a broken connection fails them all with `RankLost`."""

    def __init__(self, rank: int, channel: Channel, lost: Callable[[Exception], None]) -> None:
        self.rank = rank
        self.shard: ShardAddress | None = None  # from `open` on
        self._channel = channel
        self._lost = lost
        self._error: Exception | None = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._settling: dict[int, asyncio.Future[None]] = {}
        self._opened: asyncio.Future[ShardAddress] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.ensure_future(self._listen())]

    async def open(self) -> None:
        """Let the rank load; returns when it has. Raises what it raised there."""
        self._channel.send(wire.Open())
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            self.shard = await asyncio.shield(self._opened)
        self._tasks.append(asyncio.ensure_future(self._beat()))

    def execute(self, plan: StepPlan) -> "asyncio.Future[RankStep]":
        return self._call(lambda number: wire.Execute(number, plan))

    async def connect(self, peer: PeerAddress) -> LinkReport:
        report: LinkReport = await self._call(lambda number: wire.Connect(number, peer))
        return report

    def pull(self, order: PullOrder) -> Read:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done: asyncio.Future[ReadStats] = self._call(lambda number: wire.Pull(number, order))
        if self._error is None:
            self._settling[self._number] = settled
        else:
            settled.set_result(None)
        return Read(done, settled)

    async def forget(self, incarnation: str) -> None:
        await self._call(lambda number: wire.Forget(number, incarnation))

    async def close(self) -> None:
        """Let the rank close in its own time, then hang up."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._call(wire.Close)
        except (TimeoutError, RankLost) as error:
            logger.warning("rank %d did not close: %s", self.rank, error or "no answer in time")
        self._end(RankLost(f"rank {self.rank} is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def _call(self, frame: Callable[[int], msgspec.Struct]) -> "asyncio.Future[Any]":
        self._number += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_observe)
        if self._error is not None:
            future.set_exception(self._error)
        else:
            self._waiting[self._number] = future
            self._channel.send(frame(self._number))
        return future

    async def _listen(self) -> None:
        try:
            while True:
                async with asyncio.timeout(SILENT_S if self.shard else None):
                    data = await self._channel.receive(wire.FRAME_BYTES)
                self._take(msgspec.msgpack.decode(data, type=wire.ToLeader))
        except (*BROKEN, TimeoutError) as error:
            reason = f"was silent for {SILENT_S:.0f} s" if isinstance(error, TimeoutError) else "hung up"
            self._end(RankLost(f"rank {self.rank} {reason}: its process died, or its node is cut off"))

    async def _beat(self) -> None:
        while True:
            self._channel.send(wire.Alive())
            await asyncio.sleep(wire.BEAT_S)

    def _take(self, frame: wire.ToLeader) -> None:
        match frame:
            case wire.Opened(shard):
                self._opened.set_result(shard)
            case wire.Stepped(number, answer) | wire.Connected(number, answer) | wire.Pulled(number, answer):
                self._answer(number).set_result(answer)
            case wire.Done(number):
                self._answer(number).set_result(None)
            case wire.Failed(0):
                self._opened.set_exception(wire.error_of(frame))
            case wire.Failed(number):
                self._answer(number).set_exception(wire.error_of(frame))
            case wire.Settled(number):
                self._settling.pop(number).set_result(None)
            case wire.Moved(shard):
                self.shard = shard

    def _answer(self, number: int) -> "asyncio.Future[Any]":
        """The future of a call; another one if its caller has gone."""
        future = self._waiting.pop(number)
        return future if not future.done() else asyncio.get_running_loop().create_future()

    def _end(self, error: Exception) -> None:
        """Fail what waits. No byte of ours lands in a pool that has gone with its process: its pulls have settled."""
        if self._error is not None:
            return
        self._error = error
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        for settled in self._settling.values():
            settled.set_result(None)
        self._waiting.clear()
        self._settling.clear()
        self._lost(error)


class GangExecutor:
    """`Executor` over the ranks of one gang. Close it, or processes, memory and sockets stay."""

    def __init__(
        self, facts: ModelFacts, config: WorkerConfig, own: Rank, others: tuple[RemoteRank, ...], meeting: "_Meeting"
    ) -> None:
        self.facts = facts
        self.depth = config.parallel.pipeline
        self._tensor = config.parallel.tensor
        self._own = own
        self._others = others
        self._meeting = meeting
        self._bubble = BubbleMeter(config.parallel.pipeline)

    @property
    def bubble_share(self) -> float:
        return self._bubble.share

    async def execute(self, plan: StepPlan) -> StepResult:
        """As the port says. The first rank that fails fails the step, and with it the gang."""
        begun_s = asyncio.get_running_loop().time()
        sent = [other.execute(plan) for other in self._others]
        steps = await self._all([self._own.execute(plan), *sent])
        stages = [steps[start : start + self._tensor] for start in range(0, len(steps), self._tensor)]
        busy = [max(step.seconds - step.wait_s for step in stage) for stage in stages]
        self._bubble.add(begun_s, asyncio.get_running_loop().time(), busy)
        drawn = stages[-1][0]
        digests = tuple(step.digests for step in steps)
        return StepResult(plan.number, drawn.tokens, drawn.logprobs, digests, sum(busy), drawn.prompt_logprobs)

    def shards(self) -> tuple[ShardAddress, ...]:
        others = (other.shard for other in self._others)
        return (self._own.shard(), *(shard for shard in others if shard is not None))

    async def connect(self, peer: PeerAddress) -> LinkReport:
        reports = await self._all([self._own.connect(peer), *(other.connect(peer) for other in self._others)])
        return slowest(reports)

    def pull(self, order: PullOrder) -> Read:
        """Every rank reads its own pieces; done when all are, settled when all are."""
        loop = asyncio.get_running_loop()
        reads = [self._own.pull(order), *(other.pull(order) for other in self._others)]
        joined = Read(loop.create_future(), loop.create_future())
        joined.done.add_done_callback(_observe)
        done = asyncio.ensure_future(self._all([read.done for read in reads]))
        done.add_done_callback(lambda ended: _pass_on(ended, joined.done))
        settled = asyncio.ensure_future(asyncio.wait([read.settled for read in reads]))
        settled.add_done_callback(lambda _: joined.settled.set_result(None))
        return joined

    async def forget(self, incarnation: str) -> None:
        await self._all([self._own.forget(incarnation), *(other.forget(incarnation) for other in self._others)])

    async def failure(self) -> Exception:
        return await asyncio.shield(self._meeting.failure)

    async def close(self) -> None:
        if self._meeting.failure.done():
            self._own.abort()
        await self._meeting.close()
        await self._own.close()

    async def _all(self, calls: "Sequence[Awaitable[Any]]") -> list[Any]:
        """All answers, or the first error at once."""
        return list(await asyncio.gather(*calls))


class _Meeting:
    """The gang's door: ranks call here at start, and hang up at the end. Owns their connections and their launcher."""

    def __init__(self, config: WorkerConfig, incarnation: str, launcher: RankLauncher) -> None:
        loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[Exception] = loop.create_future()
        self.remotes: dict[int, RemoteRank] = {}
        self._config = config
        self._incarnation = incarnation
        self._secret = require_secret(config.secret.encode())
        self._launcher = launcher
        self._server: asyncio.Server | None = None
        self._store: TCPStore | None = None
        self._joined = asyncio.Event()
        self._closing = False
        self._ends: list[asyncio.Future[Any]] = []

    async def gather(self) -> Seat:
        """Launch the other ranks and wait until all have called; answers our own seat. Raises `RankLost`."""
        host = self._config.transfer.host
        self._server = await asyncio.start_server(self._accept, host, 0)
        self._store = open_store(host)
        port = self._server.sockets[0].getsockname()[1]
        seats = [Seat(rank, host, self._store.port) for rank in range(self._config.parallel.world_size)]
        orders = [RankOrder(self._config, self._incarnation, seat, host, port) for seat in seats[1:]]
        for order, ended in zip(orders, self._launcher.launch(orders), strict=True):
            end = asyncio.ensure_future(ended)
            self._ends.append(end)
            end.add_done_callback(lambda end, rank=order.seat.rank: self._ended(rank, end))  # type: ignore[misc]
        joined: asyncio.Future[Any] = asyncio.ensure_future(self._joined.wait())
        waits: set[asyncio.Future[Any]] = {joined, self.failure}
        await asyncio.wait(waits, timeout=JOIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if self.failure.done():
            raise self.failure.result()
        if not self._joined.is_set():
            missing = sorted({order.seat.rank for order in orders} - self.remotes.keys())
            raise RankLost(f"{self._config.name}: ranks {missing} did not come within {JOIN_TIMEOUT_S:.0f} s")
        return seats[0]

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*(remote.close() for remote in self.remotes.values()))
        if self._server is not None:
            self._server.close()
        await self._launcher.end()
        if self._ends:
            await asyncio.wait(self._ends, timeout=CLOSE_TIMEOUT_S)
        self._store = None
        if not self.failure.done():
            self.failure.cancel()

    def lost(self, error: Exception) -> None:
        if not self._closing and not self.failure.done():
            logger.error("worker %s: %s", self._config.name, error)
            self.failure.set_result(error)

    def _ended(self, rank: int, end: "asyncio.Future[Any]") -> None:
        error = None if end.cancelled() else end.exception()
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}" if error else ""
        self.lost(RankLost(f"rank {rank} ended{f' ({reason})' if reason else ''}"))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                rank = await self._greet(channel)
        except (*BROKEN, TimeoutError, RankLost) as error:
            logger.warning("worker %s: a caller was turned away: %s", self._config.name, error)
            await channel.close()
            return
        self.remotes[rank] = RemoteRank(rank, channel, self.lost)
        if len(self.remotes) == self._config.parallel.world_size - 1:
            self._joined.set()

    async def _greet(self, channel: Channel) -> int:
        ours = nonce()
        channel.send(wire.Hello(ours))
        join = msgspec.msgpack.decode(await channel.receive(wire.STRANGER_BYTES), type=wire.Join)
        bound = wire.seat_name(self._incarnation, join.rank)
        if not proves(join.proof, proof(self._secret, b"gang rank", ours, join.nonce, bound)):
            raise RankLost("it does not know the secret of this gang")
        if not 0 < join.rank < self._config.parallel.world_size or join.rank in self.remotes:
            raise RankLost(f"rank {join.rank} is none of those that are missing")
        channel.send(wire.Welcome(proof(self._secret, b"gang leader", ours, join.nonce, bound)))
        return join.rank


def open_store(host: str) -> TCPStore:
    """Where the ranks' process groups find each other: listens on `host` only, at a free port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEET_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )


async def open_gang(
    config: WorkerConfig,
    folder: ModelFolder,
    incarnation: str,
    launcher: RankLauncher,
    shared: SharedMemory | None = None,
) -> GangExecutor:
    """Start every rank and load its part of the model. On any error what was started is taken down.

    Raises `ModelError` for a model that cannot be split so, or does not load; `RankLost` when a rank does not come.
    """
    shape = read_model_config(folder.path)
    for rank in range(config.parallel.world_size):
        shard_of(shape, config.parallel, rank)  # refuses before any process starts
    meeting = _Meeting(config, incarnation, launcher)
    opening: asyncio.Future[tuple[ModelFacts, Rank]] | None = None
    try:
        seat = await meeting.gather()
        others = tuple(meeting.remotes[rank] for rank in sorted(meeting.remotes))
        opening = asyncio.ensure_future(open_rank(config, folder, incarnation, shared, seat))
        await _first_error([opening, *(_named(other.rank, other.open()) for other in others)])
        facts, own = opening.result()
        executor = GangExecutor(facts, config, own, others, meeting)
        for plan in warm_up(config.engine.block_size):
            await executor.execute(plan)
    except BaseException:
        await meeting.close()
        if opening is not None:
            await _abandon(opening)
        raise
    return executor


async def _named(rank: int, opening: Coroutine[Any, Any, None]) -> None:
    """Say which rank could not open."""
    try:
        await opening
    except ModelError as error:
        raise ModelError(f"rank {rank}: {error}") from error


async def _first_error(calls: "Sequence[Awaitable[Any]]") -> None:
    await asyncio.gather(*calls)


async def _abandon(opening: "asyncio.Future[tuple[ModelFacts, Rank]]") -> None:
    """Close our own rank if it opens yet: its thread cannot be stopped, and ends by its own deadlines."""
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result()[1].close()


def _observe(done: "asyncio.Future[Any]") -> None:
    """Mark the error as seen, whoever waits for it or not."""
    if not done.cancelled():
        done.exception()


def _pass_on(ended: "asyncio.Future[list[ReadStats]]", done: "asyncio.Future[ReadStats]") -> None:
    """The ranks' stats as one."""
    if done.done():
        return
    if ended.cancelled():
        done.cancel()
    elif (error := ended.exception()) is not None:
        done.set_exception(error)
    else:
        every = ended.result()
        done.set_result(
            ReadStats(
                num_bytes=sum(stats.num_bytes for stats in every),
                num_descriptors=sum(stats.num_descriptors for stats in every),
                seconds=max(stats.seconds for stats in every),
                num_digests=sum(stats.num_digests for stats in every),
                digest_seconds=max(stats.digest_seconds for stats in every),
            )
        )
