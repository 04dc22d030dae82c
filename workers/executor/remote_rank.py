"""The leader's end of one rank: numbered calls over one connection, and what becomes of them when it breaks.

Knows frames; knows no gang and no schedule.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from kvtransfer.control_wire import Channel
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read, ReadStats
from workers.engine.step import StepPlan
from workers.errors import RankLost
from workers.executor import gang_wire as wire
from workers.executor.rank import RankStep

OPEN_TIMEOUT_S = 600.0  # for a rank to fetch and load its part of the model
OPEN_SILENT_S = 30.0  # while it does: loading may hold its event loop up
SILENT_S = 5.0  # a rank beats every second
CLOSE_TIMEOUT_S = 5.0


class RemoteRank:
    """Calls fail with `RankLost` once the connection has ended; `lost` is told, once, why. Close it in any case."""

    def __init__(self, rank: int, channel: Channel, lost: Callable[[Exception], None]) -> None:
        self.rank = rank
        self.shard: ShardAddress | None = None  # from `open` on
        self.ticks = 0  # as of its last beat
        self._channel = channel
        self._line = wire.Line(channel, OPEN_SILENT_S)
        self._lost = lost
        self._error: Exception | None = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._settling: dict[int, asyncio.Future[None]] = {}
        self._opened: asyncio.Future[ShardAddress] = asyncio.get_running_loop().create_future()
        self._opened.add_done_callback(observe)
        self._tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self._listen()),
            asyncio.ensure_future(self._line.beat()),
        ]

    async def open(self) -> None:
        """Let the rank load; returns when it has. Raises what it raised there."""
        self._line.send(wire.Open())
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await asyncio.shield(self._opened)
        except TimeoutError:
            raise RankLost(f"rank {self.rank} has not loaded its part within {OPEN_TIMEOUT_S:.0f} s") from None

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

    def hang_up(self, error: Exception) -> None:
        """Without asking: the rank ends by itself when it learns of it. All calls fail with `error`."""
        if self._error is None:
            self._end(error)
            self._tasks.append(asyncio.ensure_future(self._channel.close()))

    async def close(self) -> str:
        """Let the rank close in its own time, then hang up. Answers what went wrong with that, if anything did."""
        problem = ""
        if self._error is None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._call(wire.Close)
            except TimeoutError:
                problem = f"rank {self.rank} has not closed within {CLOSE_TIMEOUT_S:.0f} s"
            except Exception as error:
                problem = str(error)
        self._end(RankLost(f"rank {self.rank} is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        return problem

    def _call(self, frame: Callable[[int], msgspec.Struct]) -> "asyncio.Future[Any]":
        self._number += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(observe)
        if self._error is not None:
            future.set_exception(self._error)
        else:
            self._waiting[self._number] = future
            self._line.send(frame(self._number))
        return future

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._line.receive(wire.ToLeader))
        except EOFError:
            if self._line.silent:
                reason = f"was silent for {self._line.patience_s:.0f} s: its process is stopped, or its node is cut off"
            else:
                reason = "hung up: its process died, or its node is cut off"
        except OSError as error:
            reason = f"cannot be reached any more: {error}"
        except Exception as error:  # nothing may end this task unseen: everybody would wait for ever
            reason = f"sent what no rank of a gang sends: {type(error).__name__}: {error}"
        self.hang_up(RankLost(f"rank {self.rank} {reason}"))

    def _take(self, frame: wire.ToLeader) -> None:
        match frame:
            case wire.Opened(shard):
                self.shard = shard
                self._line.patience_s = SILENT_S
                self._opened.set_result(shard)
            case wire.Stepped(number, answer) | wire.Connected(number, answer) | wire.Pulled(number, answer):
                self._answer(number).set_result(answer)
            case wire.Done(number):
                self._answer(number).set_result(None)
            case wire.Failed(0):
                self._opened.set_exception(wire.error_of(frame, self.rank))
            case wire.Failed(number):
                self._answer(number).set_exception(wire.error_of(frame, self.rank))
            case wire.Settled(number):
                self._settling.pop(number).set_result(None)
            case wire.Moved(shard):
                self.shard = shard
            case wire.Alive(ticks):
                self.ticks = ticks

    def _answer(self, number: int) -> "asyncio.Future[Any]":
        """The future of a call; another one if its caller has gone. KeyError for a call that nobody made."""
        future = self._waiting.pop(number)
        if future.done():
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(observe)
        return future

    def _end(self, error: Exception) -> None:
        """Fail what waits. No byte of ours lands in a pool that has gone with its process: its pulls have settled."""
        if self._error is not None:
            return
        self._error = error
        for future in (self._opened, *self._waiting.values()):
            if not future.done():
                future.set_exception(error)
        for settled in self._settling.values():
            settled.set_result(None)
        self._waiting.clear()
        self._settling.clear()
        self._lost(error)


def observe(done: "asyncio.Future[Any]") -> None:
    """Mark the error as seen, whoever waits for it or not."""
    if not done.cancelled():
        done.exception()
