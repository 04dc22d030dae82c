"""The executor with several ranks: tensor and pipeline parallel, one process (or task) per rank.

The leader runs in the worker's process, holds rank 0, and sends each plan to all ranks at once. Each rank computes its
plans in the order in which they arrive; the stages of a pipeline wait for each other's activations, not for the leader.

    Engine ──plan──> GangExecutor ──> rank 0 (here)
                          └─ Execute ──> ranks 1 .. n-1 (`rank_server`, wherever the launcher put them)

A lost rank fails the gang: `failure` returns the error, every call raises, and the other ranks exit when their
connection to the leader closes. Knows ranks and frames; does not know what runs them (`RankLauncher`) or the schedule.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from msgspec import structs
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diptych.background_tasks import BackgroundTasks
from kvtransfer.errors import PeerLost, PeerRefused
from kvtransfer.links import slowest
from kvtransfer.open import SharedMemory
from kvtransfer.rpc.connection import observe
from kvtransfer.rpc.frames import FrameStream
from kvtransfer.rpc.handshake import MAX_UNAUTHENTICATED
from kvtransfer.rpc.listener import RpcListener
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress, rank_name
from kvtransfer.transport import PullOrder, Read, ReadStats, summed
from workers.config import WorkerConfig
from workers.engine.block_store import BlockStore
from workers.engine.executor import RemoteAttend, SpanQuery
from workers.engine.step import StepPlan, StepResult
from workers.errors import ModelError, RankLost
from workers.executor.bubble import BubbleMeter
from workers.executor.gang_store import GangStore
from workers.executor.gang_wire import GANG_PROTOCOL
from workers.executor.rank import Rank
from workers.executor.rank_loader import MEET_TIMEOUT_S, close_opened, open_rank
from workers.executor.rank_spec import RankLauncher, RankSpec, Rendezvous, sampling_rank
from workers.executor.remote_kv import by_heads
from workers.executor.remote_rank import CLOSE_TIMEOUT_S, RemoteRank
from workers.executor.warm_up import warm_up
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.shard import ModelShard, shard_of
from workers.request import Adapter, Grammar

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0  # for a rank's process to start and connect; imports take a minute on a busy machine
GREET_TIMEOUT_S = 10.0  # for the handshake of a connection
CAUSE_TIMEOUT_S = 1.0  # for a failed rank to report its own error after its neighbors reported it lost


class GangExecutor:
    """`Executor` over the ranks of one gang. Close it to end its processes and free memory and sockets."""

    runs_ahead = False
    execute_decodes = None

    def __init__(
        self,
        config: WorkerConfig,
        shards: Sequence[ModelShard],
        own: Rank,
        others: tuple[RemoteRank, ...],
        connections: "_Connections",
    ) -> None:
        self.facts = own.facts
        self.depth = config.parallel.pipeline
        self._tensor = config.parallel.tensor
        self._sampling_rank = sampling_rank(config.parallel)
        self._model_shards = shards
        self._own = own
        self._others = others
        self._ranks: tuple[Rank | RemoteRank, ...] = (own, *others)
        self._connections = connections
        self._steps = BackgroundTasks()
        connections.failure.add_done_callback(lambda _: own.abort())
        self._stores = tuple(GangStore(cache, others, self.facts.layout.block_bytes) for cache in own.caches.values())
        self._bubble = BubbleMeter(config.parallel.pipeline)

    @property
    def bubble_share(self) -> float:
        return self._bubble.share

    async def prepare(self, grammar: Grammar) -> None:
        await self._ranks[self._sampling_rank].prepare(grammar)

    async def load_adapter(self, adapter: Adapter, drop: tuple[str, ...]) -> None:
        await asyncio.gather(*(rank.load_adapter(adapter, drop) for rank in self._ranks))

    async def execute(self, plan: StepPlan) -> StepResult:
        """As in the port. A rank that fails also fails the step and the gang."""
        if self._connections.failure.done():
            raise self._connections.failure.result()
        begun_s = time.monotonic()
        own = self._steps.start(self._own.execute(plan))
        own.add_done_callback(observe)
        sent = [other.execute(plan) for other in self._others]
        try:
            steps = await asyncio.gather(
                asyncio.shield(own), *sent
            )  # a cancelled caller must not leave ranks alone in a step
            if self._connections.failure.done():
                raise self._connections.failure.result()  # a GPU ends an aborted sum with any numbers
        except Exception as error:
            cause = error
            try:
                cause = await self._cause(error, {own, *sent})
            finally:  # also when the caller is cancelled
                self._connections.lost(cause)
            raise cause from None
        stages = [steps[start : start + self._tensor] for start in range(0, len(steps), self._tensor)]
        busy = [max(step.seconds - step.wait_s for step in stage) for stage in stages]
        self._bubble.add(begun_s, time.monotonic(), busy)
        return structs.replace(
            steps[self._sampling_rank],
            digests=tuple(digests for step in steps for digests in step.digests),
            seconds=sum(busy),
            wait_s=0.0,
            comm_s=0.0,
            lost=tuple(sorted({index for step in steps for index in step.lost})),
        )

    @property
    def ticks(self) -> int:
        return self._own.ticks + sum(other.ticks for other in self._others)

    def stores(self, changed: Callable[[], None]) -> tuple[BlockStore, ...]:
        for store in self._stores:
            store.changed = changed
        return self._stores

    def shards(self) -> tuple[ShardAddress, ...]:
        others = (other.shard for other in self._others)
        return (self._own.shard(), *(shard for shard in others if shard is not None))

    async def connect(self, peer: PeerAddress, *, measures: bool = True) -> LinkReport:
        others = (other.connect(peer, measures=measures) for other in self._others)
        return slowest(await asyncio.gather(self._own.connect(peer, measures=measures), *others))

    def pull(self, order: PullOrder) -> Read:
        """Every rank reads its own pieces; the read is done, or settled, when all of theirs are."""
        reads = [self._own.pull(order), *(other.pull(order) for other in self._others)]
        joined = Read(asyncio.ensure_future(_done(reads)), asyncio.ensure_future(_settled(reads)))
        joined.done.add_done_callback(observe)
        return joined

    async def forget(self, incarnation: str) -> None:
        await asyncio.gather(self._own.forget(incarnation), *(other.forget(incarnation) for other in self._others))

    def borrow(self, attend: RemoteAttend) -> None:
        """Every rank asks lenders for its own heads and layers, by way of the leader."""
        for rank in self._ranks:
            rank.borrow(attend)

    async def attend(self, blocks: tuple[int, ...], query: SpanQuery) -> bytes:
        def attend(rank: int, part: SpanQuery) -> Awaitable[bytes]:
            return self._ranks[rank].attend(blocks, part)

        try:
            return await by_heads(query, self._model_shards, self.facts.layout.head_dim, attend)
        except RankLost as error:
            raise PeerLost(f"a rank of the lender is lost: {error}") from error

    async def failure(self) -> Exception:
        return await asyncio.shield(self._connections.failure)

    async def close(self) -> None:
        """As in the port; does not wait for a lost gang."""
        if self._steps:
            await asyncio.wait(self._steps, timeout=CLOSE_TIMEOUT_S)
        await self._connections.close()
        self._own.abort()
        await self._own.close()
        for store in self._stores:
            await store.close()

    async def _cause(self, error: Exception, calls: "set[asyncio.Future[StepResult]]") -> Exception:
        """The failed rank's own error. It leaves the gang when it fails, so its neighbors' errors may arrive first."""
        loop, failure = asyncio.get_running_loop(), self._connections.failure
        deadline_s = loop.time() + CAUSE_TIMEOUT_S
        waits: set[asyncio.Future[Any]] = {*calls, failure}
        while isinstance(error, RankLost) and waits != {failure} and (left_s := deadline_s - loop.time()) > 0:
            done, waits = await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if failure in done:
                return error if failure.cancelled() else failure.result()
            for call in done:
                raised = None if call.cancelled() else call.exception()
                error = raised if isinstance(raised, Exception) and not isinstance(raised, RankLost) else error
        return error


class _Connections:
    """Listens for the ranks of one gang. Owns their connections and their launcher."""

    def __init__(self, config: WorkerConfig, incarnation: str, launcher: RankLauncher) -> None:
        loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[Exception] = loop.create_future()
        self.remotes: dict[int, RemoteRank] = {}
        self._config = config
        self._incarnation = incarnation
        self._launcher = launcher
        self._listener = RpcListener(
            GANG_PROTOCOL.name,
            config.secret.encode(),
            self._admit,
            self._serve,
            handshake_s=GREET_TIMEOUT_S,
            max_unauthenticated=MAX_UNAUTHENTICATED + config.parallel.world_size,
        )
        self._store: TCPStore | None = None
        self._joined = asyncio.Event()
        self._closing = False
        self._ends: list[asyncio.Future[Any]] = []

    async def open(self) -> Rendezvous:
        """Launch the other ranks and wait until all have joined; returns rank 0's rendezvous. Raises `RankLost`."""
        try:
            return await self._launch()
        finally:
            await self._listener.stop_accepting()

    async def _launch(self) -> Rendezvous:
        host = self._config.transfer.host
        port = await self._listener.start(host)
        self._store = open_store(host)
        rendezvous = [Rendezvous(rank, host, self._store.port) for rank in range(self._config.parallel.world_size)]
        specs = [RankSpec(self._config, self._incarnation, each, host, port) for each in rendezvous[1:]]
        for spec, ended in zip(specs, self._launcher.launch(specs), strict=True):
            end = asyncio.ensure_future(ended)
            self._ends.append(end)
            end.add_done_callback(lambda end, rank=spec.rendezvous.rank: self._ended(rank, end))  # type: ignore[misc]
        joined: asyncio.Future[Any] = asyncio.ensure_future(self._joined.wait())
        waits: set[asyncio.Future[Any]] = {joined, self.failure}
        await asyncio.wait(waits, timeout=JOIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if self.failure.done():
            raise self.failure.result()
        if not self._joined.is_set():
            missing = sorted({spec.rendezvous.rank for spec in specs} - self.remotes.keys())
            raise RankLost(f"{self._config.name}: ranks {missing} did not join within {JOIN_TIMEOUT_S:.0f} s")
        return rendezvous[0]

    async def close(self, error: Exception | None = None) -> None:
        """End the ranks. With an error, or after the gang failed, disconnect them instead of asking them to close."""
        self._closing = True
        if error is not None:
            self._disconnect(error)
        problems = await asyncio.gather(*(remote.close() for remote in self.remotes.values()))
        for problem in filter(None, problems):
            logger.warning("worker %s: %s", self._config.name, problem)
        await self._listener.close()
        self._store = None
        await self._launcher.end()
        if self._ends:
            await asyncio.wait(self._ends, timeout=CLOSE_TIMEOUT_S)
        if not self.failure.done():
            self.failure.cancel()

    def lost(self, error: Exception) -> None:
        """Fail the gang, even if some ranks still work, and wake all waiters."""
        if not self._closing and not self.failure.done():
            # As text: a kept log record would keep the error's frames, and with them the gang's memory.
            logger.error("worker %s: %s", self._config.name, str(error))
            self.failure.set_result(error)
            self._disconnect(error)

    def _disconnect(self, error: Exception) -> None:
        """Without the store no ranks can meet, and without its leader each rank exits."""
        for remote in self.remotes.values():
            remote.disconnect(error)
        self._store = None

    def _ended(self, rank: int, end: "asyncio.Future[Any]") -> None:
        error = None if end.cancelled() else end.exception()
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}" if error else ""
        self.lost(RankLost(f"rank {rank} ended{f' ({reason})' if reason else ''}"))

    def _admit(self, target: str) -> bytes:
        missing = set(range(1, self._config.parallel.world_size)) - self.remotes.keys()
        if target not in {rank_name(self._incarnation, rank) for rank in missing}:
            raise PeerRefused(f"{target} is not a missing rank of this gang")
        return b""

    async def _serve(self, target: str, stream: FrameStream) -> None:
        rank = int(target.rpartition("/")[2])
        remote = self.remotes[rank] = RemoteRank(rank, stream, self.lost)
        if len(self.remotes) == self._config.parallel.world_size - 1:
            self._joined.set()
        await remote.run()


def open_store(host: str) -> TCPStore:
    """The store where the ranks' process groups find each other; listens on `host` only, at a free port."""
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
    """Start every rank and load its part of the model. On any error, end what was started.

    Raises `ModelError` if the model cannot be split this way or does not load, and `RankLost` if a rank does not join.
    """
    shape = read_model_config(folder.path)
    shards = [shard_of(shape, config.parallel, rank) for rank in range(config.parallel.world_size)]  # or it is refused
    connections = _Connections(config, incarnation, launcher)
    opening: asyncio.Future[Rank] | None = None
    try:
        rendezvous = await connections.open()
        others = tuple(connections.remotes[rank] for rank in sorted(connections.remotes))
        opening = asyncio.ensure_future(open_rank(config, folder, incarnation, shared, rendezvous))
        opened = asyncio.gather(opening, *(_named(other.rank, other.open()) for other in others))
        opened.add_done_callback(observe)
        waits: set[asyncio.Future[Any]] = {opened, connections.failure}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if connections.failure.done():
            raise connections.failure.result()
        opened.result()
        own = opening.result()
        executor = GangExecutor(config, shards, own, others, connections)
        await warm_up(config.name, executor.execute, own.warm_up_steps(config.engine, own.facts.context_length))
        for other in others:
            other.watch()
    except BaseException as error:
        await connections.close(RankLost(f"the gang failed to open: {error}"))
        if opening is not None:
            await _abandon(config.name, opening)
        raise
    return executor


async def _named(rank: int, opening: Coroutine[Any, Any, None]) -> None:
    """Add the rank to errors."""
    try:
        await opening
    except ModelError as error:
        raise ModelError(f"rank {rank}: {error}") from error


async def _abandon(name: str, opening: "asyncio.Future[Rank]") -> None:
    """Close rank 0. A load cannot be interrupted: then the rank is closed after it has loaded."""
    ending = asyncio.ensure_future(close_opened(opening, whole=False))
    _, running = await asyncio.wait([ending], timeout=CLOSE_TIMEOUT_S)
    if running:
        logger.warning("worker %s: rank 0 is still loading and is closed afterwards", name)


async def _done(reads: Sequence[Read]) -> ReadStats:
    """The statistics of all ranks, or the first error. Cancelling this does not cancel the reads."""
    return summed(await asyncio.gather(*(asyncio.shield(read.done) for read in reads)))


async def _settled(reads: Sequence[Read]) -> None:
    await asyncio.wait([read.settled for read in reads])
