"""The leader's end of one rank's connection.

Knows calls and messages; knows no gang and no schedule.
"""

import asyncio
from collections.abc import Callable

from kvtransfer.rpc.connection import RpcConnection
from kvtransfer.rpc.frames import FrameStream
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read
from workers.engine.step import StepPlan
from workers.errors import RankLost
from workers.executor import gang_wire as wire
from workers.executor.rank import RankStep

OPEN_TIMEOUT_S = 600.0  # for a rank to fetch and load its part of the model
OPEN_SILENT_S = 30.0  # while it does: loading may hold its event loop up
SILENT_S = 5.0  # a rank sends something every second
CLOSE_TIMEOUT_S = 5.0


class RemoteRank:
    """`run` it until the connection ends: then calls fail with `RankLost`, and `lost` is called once. Close it."""

    def __init__(self, rank: int, stream: FrameStream, lost: Callable[[Exception], None]) -> None:
        self.rank = rank
        self.shard: ShardAddress | None = None  # from `open` on
        self.ticks = 0  # as of its last message
        self._lost = lost
        self._num_reads = 0
        self._settling: dict[int, asyncio.Future[None]] = {}
        self._connection = RpcConnection(
            stream, wire.GANG_PROTOCOL, f"rank {rank}", on_message=self._on_message, on_lost=self._on_lost
        )
        self._connection.keep_alive(wire.Alive, OPEN_SILENT_S)

    async def run(self) -> None:
        await self._connection.run()

    async def open(self) -> None:
        """Let the rank load; returns when it has. Raises what it raised there."""
        try:
            shard = await self._connection.call(wire.Open(), OPEN_TIMEOUT_S)
        except TimeoutError:
            raise RankLost(f"rank {self.rank} has not loaded its part within {OPEN_TIMEOUT_S:.0f} s") from None
        self.shard = self.shard or shard  # `Moved` may have come right behind it
        self._connection.patience_s = SILENT_S

    def execute(self, plan: StepPlan) -> "asyncio.Future[RankStep]":
        return self._connection.begin(wire.Execute(plan))

    async def connect(self, peer: PeerAddress) -> LinkReport:
        report: LinkReport = await self._connection.begin(wire.Connect(peer))
        return report

    def pull(self, order: PullOrder) -> Read:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_reads += 1
        done = self._connection.begin(wire.Pull(self._num_reads, order))
        if done.done():  # it was not sent
            settled.set_result(None)
        else:
            self._settling[self._num_reads] = settled
        return Read(done, settled)

    async def forget(self, incarnation: str) -> None:
        await self._connection.begin(wire.Forget(incarnation))

    def disconnect(self, error: Exception) -> None:
        """All calls fail with `error`; the rank ends by itself when it notices."""
        self._connection.disconnect(error)
        self._settle()

    async def close(self) -> str:
        """Let the rank close in its own time, then disconnect. Returns what went wrong with that, or ""."""
        problem = ""
        if self._connection.error is None:
            try:
                await self._connection.call(wire.Close(), CLOSE_TIMEOUT_S)
            except TimeoutError:
                problem = f"rank {self.rank} has not closed within {CLOSE_TIMEOUT_S:.0f} s"
            except Exception as error:
                problem = str(error)
        await self._connection.close()
        self._settle()
        return problem

    def _on_message(self, message: wire.Settled | wire.Moved | wire.Alive) -> None:
        match message:
            case wire.Settled(read):
                self._settling.pop(read).set_result(None)
            case wire.Moved(shard):
                self.shard = shard
            case wire.Alive(ticks):
                self.ticks = ticks

    def _on_lost(self, error: Exception) -> None:
        self._settle()
        self._lost(error)

    def _settle(self) -> None:
        """A pool that has gone with its process gets no byte any more: its reads have settled."""
        for settled in self._settling.values():
            settled.set_result(None)
        self._settling.clear()
