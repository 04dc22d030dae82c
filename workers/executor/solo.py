"""The executor with one rank: adapts a `Rank` in this process to the `Executor` port."""

import asyncio
from collections.abc import Callable

from kvtransfer.open import SharedMemory
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read
from workers.config import WorkerConfig
from workers.engine.block_store import BlockStore
from workers.engine.executor import ModelFacts, RemoteAttend, SpanQuery
from workers.engine.step import StepPlan, StepResult
from workers.executor.opening import open_rank
from workers.executor.rank import Rank
from workers.executor.warm_up import warm_up
from workers.model.folder import ModelFolder
from workers.request import Adapter, Grammar


class SoloExecutor:
    """`Executor` over one `Rank`. Close it to free its memory and sockets."""

    depth = 1
    bubble_share = 0.0
    execute_decodes = None

    def __init__(self, facts: ModelFacts, rank: Rank) -> None:
        self.facts = facts
        self.runs_ahead = rank.runs_ahead
        self._rank = rank

    async def prepare(self, grammar: Grammar) -> None:
        await self._rank.prepare(grammar)

    async def load_adapter(self, adapter: Adapter, drop: tuple[str, ...]) -> None:
        await self._rank.load_adapter(adapter, drop)

    async def execute(self, plan: StepPlan) -> StepResult:
        return await self._rank.execute(plan)

    @property
    def ticks(self) -> int:
        return self._rank.ticks

    def stores(self, changed: Callable[[], None]) -> tuple[BlockStore, ...]:
        return self._rank.stores(changed)

    def shards(self) -> tuple[ShardAddress, ...]:
        return (self._rank.shard(),)

    async def connect(self, peer: PeerAddress, *, measures: bool = True) -> LinkReport:
        return await self._rank.connect(peer, measures=measures)

    def pull(self, order: PullOrder) -> Read:
        return self._rank.pull(order)

    async def forget(self, incarnation: str) -> None:
        await self._rank.forget(incarnation)

    def borrow(self, attend: RemoteAttend) -> None:
        self._rank.borrow(attend)

    async def attend(self, blocks: tuple[int, ...], query: SpanQuery) -> bytes:
        return await self._rank.attend(blocks, query)

    async def failure(self) -> Exception:
        """Never returns: errors come from `execute`."""
        never: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        await self._rank.close()


async def open_solo(
    config: WorkerConfig, folder: ModelFolder, incarnation: str, shared: SharedMemory | None = None
) -> SoloExecutor:
    """See `open_rank` for arguments and errors."""
    assert config.parallel.world_size == 1
    facts, rank = await open_rank(config, folder, incarnation, shared)
    executor = SoloExecutor(facts, rank)
    try:
        await warm_up(config.name, executor.execute, rank.warm_up_steps(config.engine, facts.context_length))
    except BaseException:
        await executor.close()
        raise
    return executor
