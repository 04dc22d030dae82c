"""Attention to KV that other workers hold, by arithmetic: what a step waits for its lenders, and what these spend.

A step makes one call for all layers to each lender, which takes the seconds of one call for each layer. A byte stands
for a token's query. Knows costs and plans; knows no KV byte.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from kvtransfer.errors import TransferError
from workers.costs import CostModel
from workers.engine.executor import RemoteAttend, SpanQuery
from workers.engine.step import Chunk, StepPlan

STEP_WAIT_S = 60.0  # for all lenders of a step


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """The calls for one step, one for each layer, by the model's sizes."""

    num_layers: int
    num_heads: int
    head_dim: int

    def seconds(self, cost: CostModel, num_tokens: int) -> float:
        """Of the network, for this many queries, without the lender's work."""
        token_bytes = 4 * self.num_heads * (2 * self.head_dim + 2)  # query and state in float32
        return self.num_layers * cost.transfer_seconds(num_tokens * token_bytes)


SMOLLM2_CALLS = AttentionCalls(num_layers=30, num_heads=9, head_dim=64)


def attention_seconds(cost: CostModel, num_tokens: int, num_keys: int) -> float:
    """A device's seconds for the attention of this many queries to `num_keys` keys, in all layers."""
    if num_tokens == 1:
        return cost.decode_seconds(1, num_keys + 1) - cost.decode_seconds(1, 1)
    return cost.prefill_seconds(num_tokens, num_keys) - cost.prefill_seconds(num_tokens)


def attention_of(cost: CostModel, plan: StepPlan) -> float:
    """A device's seconds for the attention of all chunks to the keys before them."""
    return sum(attention_seconds(cost, len(chunk.tokens), chunk.first_position) for chunk in plan.chunks)


def local_part(plan: StepPlan, block_size: int) -> StepPlan:
    """A plan that costs what the borrower computes of this one: without the tokens that lenders attend to."""
    chunks = [
        structs.replace(chunk, first_position=chunk.first_position - chunk.num_remote * block_size)
        for chunk in plan.chunks
    ]
    return structs.replace(plan, chunks=tuple(chunks))


async def ask_lenders(
    attend: RemoteAttend, calls: AttentionCalls, cost: CostModel, plan: StepPlan, block_size: int
) -> tuple[int, ...]:
    """Wait for the lenders of all chunks at once. Returns the indices of chunks whose remote KV could not be used."""

    async def ask(chunk: Chunk) -> bool:
        first = 0
        try:
            async with asyncio.timeout(STEP_WAIT_S):
                for span in chunk.remote:
                    await asyncio.sleep(calls.seconds(cost, len(chunk.tokens)))
                    query, is_chunk = bytes(len(chunk.tokens)), len(chunk.tokens) > 1
                    asked = SpanQuery(0, (0, 1), first, chunk.first_position, query, is_chunk=is_chunk)
                    await attend(span, asked)
                    first += span.num_blocks * block_size
        except (TransferError, TimeoutError):
            return False
        return True

    borrowing = [index for index, chunk in enumerate(plan.chunks) if chunk.remote]
    answered = await asyncio.gather(*(ask(plan.chunks[index]) for index in borrowing))
    return tuple(index for index, is_there in zip(borrowing, answered, strict=True) if not is_there)


class SimulatedLender:
    """Attends in the order of the calls, beside the steps of its device. Owned by a SimulatedExecutor.

    `is_busy`: whether a step runs. It shares the device with the attention, so the next step takes longer by that.
    """

    def __init__(self, cost: CostModel, is_busy: Callable[[], bool]) -> None:
        self._cost = cost
        self._is_busy = is_busy
        self._until_s = 0.0
        self._lent_s = 0.0

    async def attend(self, num_tokens: int, num_keys: int) -> None:
        seconds = attention_seconds(self._cost, num_tokens, num_keys)
        if self._is_busy():
            self._lent_s += seconds
        now_s = asyncio.get_running_loop().time()
        self._until_s = max(self._until_s, now_s) + seconds
        await asyncio.sleep(self._until_s - now_s)

    def take_lent(self) -> float:
        """Seconds by which attention delayed steps since the last call."""
        lent_s, self._lent_s = self._lent_s, 0.0
        return lent_s
