"""The leader's side of the connection to one rank.

Knows calls and messages; knows no gang and no schedule.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import structs

from kvtransfer.rpc.connection import RpcConnection
from kvtransfer.rpc.frames import FrameStream, ProtocolError
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read
from workers.engine.executor import RemoteAttend, SpanQuery
from workers.engine.kv_event_log import Tier
from workers.engine.step import StepPlan, StepResult
from workers.errors import RankLost
from workers.executor import gang_wire as wire
from workers.request import Adapter, Grammar

OPEN_TIMEOUT_S = 600.0  # for a rank to fetch and load its part of the model
OPEN_SILENT_S = 30.0  # while it loads and compiles, which may block its event loop
SILENT_S = 5.0  # a rank sends a message every second
CLOSE_TIMEOUT_S = 5.0


class RemoteRank:
    """`run` it until the connection ends; then calls raise `RankLost` and `lost` is called once. Close it."""

    def __init__(self, rank: int, stream: FrameStream, lost: Callable[[Exception], None]) -> None:
        self.rank = rank
        self.shard: ShardAddress | None = None  # None before `open`
        self.ticks = 0  # from its last message
        self._attend: RemoteAttend | None = None
        self._lost = lost
        self._num_reads = 0
        self._settling: dict[int, asyncio.Future[None]] = {}
        self._connection = RpcConnection(
            stream,
            wire.GANG_PROTOCOL,
            f"rank {rank}",
            on_call=self._on_call,
            on_message=self._on_message,
            on_lost=self._on_lost,
        )
        self._connection.keep_alive(wire.Alive, OPEN_SILENT_S)

    async def run(self) -> None:
        await self._connection.run()

    async def open(self) -> None:
        """Make the rank load its part; returns when it has. Raises the rank's own error."""
        try:
            shard = await self._connection.call(wire.CALLS["open"](), OPEN_TIMEOUT_S)
        except TimeoutError:
            raise RankLost(f"rank {self.rank} did not load its part within {OPEN_TIMEOUT_S:.0f} s") from None
        self.shard = self.shard or shard  # `Moved` may have arrived right after it

    def watch(self) -> None:
        """It is warmed up: from now on it is lost if it is silent for `SILENT_S`."""
        self._connection.patience_s = SILENT_S

    def prepare(self, grammar: Grammar) -> "asyncio.Future[None]":
        return self._call("prepare", grammar)

    def load_adapter(self, adapter: Adapter, drop: tuple[str, ...]) -> "asyncio.Future[None]":
        return self._call("load_adapter", adapter, drop)

    def execute(self, plan: StepPlan) -> "asyncio.Future[StepResult]":
        return self._call("execute", plan)

    def connect(self, peer: PeerAddress, *, measures: bool = True) -> "asyncio.Future[LinkReport]":
        return self._call("connect", peer, measures)

    def pull(self, order: PullOrder) -> Read:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_reads += 1
        done = self._call("pull", self._num_reads, order)
        if done.done():  # the connection is lost
            settled.set_result(None)
        else:
            self._settling[self._num_reads] = settled
        return Read(done, settled)

    def forget(self, incarnation: str) -> "asyncio.Future[None]":
        return self._call("forget", incarnation)

    def borrow(self, attend: RemoteAttend) -> None:
        self._attend = attend

    def attend(self, blocks: tuple[int, ...], query: SpanQuery) -> "asyncio.Future[bytes]":
        return self._call("attend", blocks, query)

    def write_block(self, tier: Tier, block_hash: bytes, prefix: int | None, block: int) -> "asyncio.Future[bool]":
        return self._call("write_block", tier, block_hash, prefix, block)

    def read_block(self, tier: Tier, block_hash: bytes, block: int, timeout_s: float) -> "asyncio.Future[bool]":
        return self._call("read_block", tier, block_hash, block, timeout_s)

    def _call(self, method: str, *arguments: object) -> "asyncio.Future[Any]":
        return self._connection.begin(wire.CALLS[method](*arguments))

    def forget_blocks(self, tier: Tier, hashes: tuple[bytes, ...]) -> None:
        self._connection.notify(wire.ForgetBlocks(tier, hashes))

    def disconnect(self, error: Exception) -> None:
        """All calls raise `error`; the rank exits when it notices."""
        self._connection.disconnect(error)
        self._settle()

    async def close(self) -> str:
        """Ask the rank to close, then disconnect. Returns what went wrong, or ""."""
        problem = ""
        if self._connection.error is None:
            try:
                await self._connection.call(wire.CALLS["close"](), CLOSE_TIMEOUT_S)
            except TimeoutError:
                problem = f"rank {self.rank} did not close within {CLOSE_TIMEOUT_S:.0f} s"
            except Exception as error:
                problem = str(error)
        await self._connection.close()
        self._settle()
        return problem

    async def _on_call(self, request: Any) -> bytes:
        if not isinstance(request, wire.CALLS["ask_lender"]):
            raise ProtocolError(f"a rank does not call {type(request).__name__}")
        assert self._attend is not None, "a plan with remote KV comes after `borrow`"
        return await self._attend(*structs.astuple(request))

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
        """No more bytes can arrive in the pool of a process that has exited: its reads have settled."""
        for settled in self._settling.values():
            settled.set_result(None)
        self._settling.clear()
