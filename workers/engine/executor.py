"""The port between the engine and what computes its steps: one rank, a gang of ranks, or a simulated rank.

Implementations live in `workers.executor`. All methods are called from one event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.layout import KVLayout
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.ticket import SpanQuery as SpanQuery
from kvtransfer.transport import PullOrder, Read
from workers.engine.block_store import BlockStore
from workers.engine.step import RemoteKV, StepPlan, StepResult
from workers.request import Adapter, Grammar


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the worker needs to know about the loaded model."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    layout: KVLayout  # of the whole model, unsharded
    tokenizer: str = ""  # its id; empty: it has none
    default_sampling: tuple[tuple[str, float], ...] = ()  # (name, value) pairs that the model's authors recommend
    kv_blocks: int = 0  # of the pool, where the configuration leaves that to the executor
    host_cache_blocks: int = 0


RemoteAttend = Callable[[RemoteKV, SpanQuery], Awaitable[bytes]]
"""The state after the KV that a lender holds. Called on the event loop. Raises `TransferError`."""


class RunningDecodes(Protocol):
    """Steps in a row that decode the same sequences. `ends_s`: on the loop's clock. `result`: of the last one,
    without tokens, which `sample` gives.
    """

    seconds: list[float]
    ends_s: list[float]
    result: asyncio.Future[StepResult]

    def observe(self, first: int, used: list[int]) -> None:
        """Steps from `first` on have ended, each with so many blocks in use; called in order, for all but the last."""
        ...

    def sample(self, key: str, position: int, count: int) -> list[int]:
        """The tokens of this sequence from this position on; none of them is an end token."""
        ...

    def shorten(self, count: int) -> None:
        """Only `count` steps run: the ones that have ended, the one in flight, and perhaps more."""
        ...


ExecuteDecodes = Callable[[StepPlan, int, Callable[[], int]], RunningDecodes]


class Executor(Protocol):
    """`depth` plans may be in flight at once: 1 for one rank, the number of stages for a pipeline.

    `runs_ahead`: one more plan may wait for the one in flight, with `PENDING` tokens of decodes that it samples.
    """

    depth: int
    runs_ahead: bool
    facts: ModelFacts

    @property
    def bubble_share(self) -> float:
        """The stages' recent idle share of the time with a plan in flight; 0.0 for one stage. See `bubble`."""
        ...

    @property
    def ticks(self) -> int:
        """A number that changes whenever a step makes progress on any rank. It need not be exact."""
        ...

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar where tokens are sampled, beside the steps. Raises `InvalidRequest`."""
        ...

    async def load_adapter(self, adapter: Adapter, drop: tuple[str, ...]) -> None:
        """Drop these from the memory of every rank, which no later plan has, and load one, beside the steps.

        Raises `ModelError`; some ranks may have it then.
        """
        ...

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Run one plan, in the order of the calls. Not cancellable: a started step runs to its end."""
        ...

    @property
    def execute_decodes(self) -> ExecuteDecodes | None:
        """Runs a plan of decodes and so many steps like it in all, each for the next token. At the end of the last one
        the function that it gets is called for its number. None: this executor knows no step before it has run.
        """
        ...

    def stores(self, changed: Callable[[], None]) -> tuple[BlockStore, ...]:
        """Where the host cache's blocks are kept, fastest first. `changed`: to be called when reads have ended."""
        ...

    def shards(self) -> tuple[ShardAddress, ...]:
        """The registered pool of each rank."""
        ...

    async def connect(self, peer: PeerAddress, *, measures: bool = True) -> LinkReport:
        """Connect every rank to the peer's ranks, probe with one real block, and perhaps measure.

        Errors: `TransferError`.
        """
        ...

    def pull(self, order: PullOrder) -> Read:
        """Start a checked read. A digest that differs fails `done` with `DigestMismatch`."""
        ...

    async def forget(self, incarnation: str) -> None:
        """Drop a dead peer."""
        ...

    def borrow(self, attend: RemoteAttend) -> None:
        """How to reach the KV in plans' `remote`. Called once, before the first such plan.

        A chunk is lost (see `StepResult`) if `attend` raises `TransferError`, does not return in time, or returns the
        wrong number of bytes.
        """
        ...

    async def attend(self, blocks: tuple[int, ...], query: SpanQuery) -> bytes:
        """The state after these blocks of the pool, whose KV must not change meanwhile. Does not wait for a step.

        The blocks hold whole multiples of SPAN tokens. The query may have other heads than any rank here. Raises
        `TransferError` if it does not fit this model or pool, or a rank is lost.
        """
        ...

    async def failure(self) -> Exception:
        """Wait until this executor is lost, even while it is idle; returns why."""
        ...

    async def close(self) -> None:
        """Finish the step and the reads in flight, then free the memory."""
        ...
