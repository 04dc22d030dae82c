"""Attention to KV that other workers hold: the calls of a step to its lenders, and a lender's answers.

compute thread   layer's query ──> asks for the states of all remote chunks ──> attention to what is here ──> joins both
event loop       each chunk: lender after lender, in the order of their spans
lender           query and state ──> state after its span

Each rank of a gang asks for its own heads and layers. So a lender may have other ranks than the borrower: `by_heads`.
"""

import asyncio
import concurrent.futures
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.errors import TransferError
from workers.engine.executor import RemoteAttend, SpanQuery
from workers.engine.step import RemoteKV, StepPlan
from workers.model.decoder import Decoder
from workers.model.description import ModelConfig
from workers.model.shard import ModelShard
from workers.ops.batch import SPAN, KeySpan, Scoring, first_key

logger = logging.getLogger(__name__)

REMOTE_TIMEOUT_S = 5.0  # for the states of one layer
STEP_WAIT_S = 60.0  # for those of all layers, in all stages; below the engine loop's limit for a step
MAX_QUERY_BYTES = 4 << 20  # of one call; longer queries take several
MAX_AT_ONCE = 1 << 22  # numbers of a query times keys: at most some 2 ms on a CPU


@dataclass(frozen=True, slots=True)
class _Part:
    """KV of the positions [first, end) of a sequence."""

    kv: RemoteKV
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Run:
    """The tokens of a chunk with remote KV, in the step's token axis."""

    index: int  # of the chunk
    tokens: slice
    position: int  # of the first token
    spans: tuple[_Part, ...]


class RemoteStates:
    """The states of one plan, layer by layer. Made on the event loop, where `attend` runs; for the compute thread.

    `lost` are the indices of chunks whose remote KV could not be used: there are no more calls for them in this step.
    """

    def __init__(
        self, plan: StepPlan, model: ModelConfig, shard: ModelShard, block_size: int, attend: RemoteAttend
    ) -> None:
        self.lost: set[int] = set()
        self._windows = [layer.window for layer in model.layers]
        self._shard = shard
        self._attend = attend
        self._loop = asyncio.get_running_loop()
        self._left_s = STEP_WAIT_S / shard.stages
        self._runs: list[_Run] = []
        start = 0
        for index, chunk in enumerate(plan.chunks):
            tokens = slice(start, start + len(chunk.tokens))
            start = tokens.stop
            if chunk.remote:
                ends = itertools.accumulate((each.num_blocks * block_size for each in chunk.remote), initial=0)
                spans = (_Part(kv, *at) for kv, at in zip(chunk.remote, itertools.pairwise(ends), strict=True))
                self._runs.append(_Run(index, tokens, chunk.first_position, tuple(spans)))

    def __call__(self, layer: int, query: Tensor) -> Callable[[], Tensor]:
        """Ask for [tokens, heads, head_dim + 2], with the query [tokens, heads, head_dim] of this layer.

        The function returned waits until every lender has answered or failed, or the time is over.
        """
        states = np.empty((*query.shape[:2], query.shape[2] + 2), np.float32)  # of other chunks they are not read
        calls: list[tuple[_Run, Future[bytes]]] = []
        for run in self._runs:
            states[run.tokens, :, 0], states[run.tokens, :, 1:] = -np.inf, 0.0
            if run.index not in self.lost and (asking := self._asking(layer, run, query)) is not None:
                calls.append((run, asyncio.run_coroutine_threadsafe(asking, self._loop)))
        return lambda: self._answers(layer, calls, states).to(query.device)

    def _answers(self, layer: int, calls: "list[tuple[_Run, Future[bytes]]]", states: NDArray[np.float32]) -> Tensor:
        begun_s = time.monotonic()
        concurrent.futures.wait([call for _, call in calls], min(REMOTE_TIMEOUT_S, self._left_s))
        self._left_s = max(0.0, self._left_s - (time.monotonic() - begun_s))
        try:
            for run, call in calls:
                try:
                    states[run.tokens] = np.frombuffer(call.result(0), np.float32).reshape(-1, *states.shape[1:])
                except (TransferError, TimeoutError, concurrent.futures.CancelledError) as error:
                    self.lost.add(run.index)
                    reason = str(error) or "no answer in time"
                    logger.warning("chunk %d: KV on another worker is lost in layer %d: %s", run.index, layer, reason)
        finally:
            for _, call in calls:
                call.cancel()
        return torch.from_numpy(states)

    def _asking(self, layer: int, run: _Run, query: Tensor) -> Coroutine[Any, Any, bytes] | None:
        """None if the window of no query reaches a span."""
        window = self._windows[layer]
        spans = [span for span in run.spans if span.end > first_key(run.position, window)]
        if not spans:
            return None
        rows = query[run.tokens].float().cpu().numpy()
        step = max(1, MAX_QUERY_BYTES // rows[0].nbytes)
        pieces = [(run.position + at, rows[at : at + step].tobytes()) for at in range(0, len(rows), step)]
        return self._ask(layer, spans, pieces, query.shape[2], is_chunk=len(rows) > 1)

    async def _ask(
        self, layer: int, spans: list[_Part], pieces: list[tuple[int, bytes]], head_dim: int, *, is_chunk: bool
    ) -> bytes:
        """The states of one chunk. Raises `TransferError`."""
        states: list[bytes] = []
        layer, heads = layer + self._shard.layers[0], self._shard.heads
        for position, query in pieces:
            state, num_bytes = b"", len(query) // head_dim * (head_dim + 2)
            for span in spans:
                asked = SpanQuery(layer, heads, span.first, position, query, state, is_chunk)
                state = await self._attend(span.kv, asked)
                if len(state) != num_bytes:
                    raise TransferError(f"{span.kv.lender} returned {len(state)} bytes of state instead of {num_bytes}")
            states.append(state)
        return b"".join(states)


class Lender:
    """Attends to blocks of a rank's pool beside the rank's steps. Owned by a Rank.

    Large queries, and all on a GPU, run on a thread of its own. A single decode is faster than the switch to a thread.
    """

    def __init__(self, model: Decoder, shard: ModelShard, blocks: Tensor) -> None:
        self._model = model
        self._shard = shard
        self._blocks = blocks
        self._thread: ThreadPoolExecutor | None = None
        self._is_single = False

    async def attend(self, blocks: tuple[int, ...], query: SpanQuery) -> bytes:
        """As in the `Executor` port, for heads that this rank has."""
        work = self._checked(blocks, query)
        num_keys = len(blocks) * self._blocks.shape[4]
        # More threads would compete with the compute thread.
        if not self._blocks.is_cuda and len(query.query) // 4 * num_keys <= MAX_AT_ONCE:
            if not self._is_single:
                torch.set_num_threads(1)  # of the event loop's thread
                self._is_single = True
            return work()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "diptych-lender", initializer=torch.set_num_threads, initargs=(1,))
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _checked(self, blocks: tuple[int, ...], query: SpanQuery) -> Callable[[], bytes]:
        """The function that attends. Raises `TransferError` if the query does not fit."""
        (first, end), (low, high), layers = query.heads, self._shard.heads, self._shard.layers
        tokens = num_tokens(query, self._model.config.head_dim)
        if not (layers[0] <= query.layer < layers[1] and low <= first < end <= high and tokens):
            raise TransferError(
                f"a query of {len(query.query)} bytes for heads {first}..{end} of layer {query.layer} does not fit "
                f"a rank with heads {low}..{high} of layers {layers[0]}..{layers[1]}"
            )
        num_keys, position = len(blocks) * self._blocks.shape[4], query.position - query.first_position
        if num_keys % SPAN or not 0 < num_keys <= position:
            raise TransferError(
                f"a span of {num_keys} keys before position {position} is not a multiple of {SPAN} before it"
            )
        return lambda: self._attend(blocks, query, num_keys, position)

    @torch.inference_mode()
    def _attend(self, blocks: tuple[int, ...], query: SpanQuery, num_keys: int, position: int) -> bytes:
        config, pool, layer = self._model.config, self._blocks, query.layer - self._shard.layers[0]
        first, end = (head - self._shard.heads[0] for head in query.heads)

        def tensor(numbers: bytes, width: int) -> Tensor:
            """Of all heads of this rank; those that are not asked for are zeros."""
            asked = np.frombuffer(bytearray(numbers), np.float32).reshape(-1, end - first, width)
            if end - first == config.num_heads:
                return torch.from_numpy(asked).to(pool.device)
            array = np.zeros((len(asked), config.num_heads, width), np.float32)
            array[:, first:end] = asked
            return torch.from_numpy(array).to(pool.device)

        table = torch.tensor(blocks, dtype=torch.int32, device=pool.device)
        state = self._model.attention.attend_span(
            tensor(query.query, config.head_dim),
            pool,
            layer,
            KeySpan(
                table,
                num_keys,
                position,
                tensor(query.state, config.head_dim + 2) if query.state else None,
                query.first_position,
            ),
            Scoring(config.attention_scale, config.layers[layer].window, config.attention_softcap),
        )
        return state[:, first:end].cpu().contiguous().numpy().tobytes()

    async def close(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)


def num_tokens(query: SpanQuery, head_dim: int) -> int:
    """The tokens of a query. 0 if its bytes are not whole tokens of its heads."""
    heads = query.heads[1] - query.heads[0]
    tokens, rest = divmod(len(query.query), max(1, heads * head_dim * 4))
    fits = heads > 0 and not rest and len(query.state) in (0, tokens * heads * (head_dim + 2) * 4)
    return tokens if fits else 0


async def by_heads(
    query: SpanQuery,
    shards: Sequence[ModelShard],
    head_dim: int,
    attend: Callable[[int, SpanQuery], Awaitable[bytes]],
) -> bytes:
    """The state from the ranks with these shards of a model, each for those heads of the query that it has.

    `attend(rank, part of the query)` returns that part's state. Raises `TransferError`.
    """
    tokens, (first, end) = num_tokens(query, head_dim), query.heads
    parts = [
        (rank, (max(first, shard.heads[0]), min(end, shard.heads[1])))
        for rank, shard in enumerate(shards)
        if shard.layers[0] <= query.layer < shard.layers[1]
    ]
    parts = [(rank, heads) for rank, heads in parts if heads[0] < heads[1]]
    if not tokens or sum(high - low for _, (low, high) in parts) != end - first:
        raise TransferError(
            f"a query of {len(query.query)} bytes for heads {first}..{end} of layer {query.layer} fits no model here"
        )

    def cut(numbers: bytes, heads: tuple[int, int]) -> bytes:
        array = np.frombuffer(numbers, np.float32).reshape(tokens, end - first, -1)
        return array[:, heads[0] - first : heads[1] - first].tobytes()

    async def ask(rank: int, heads: tuple[int, int]) -> Any:
        state = cut(query.state, heads) if query.state else b""
        answer = await attend(rank, structs.replace(query, heads=heads, query=cut(query.query, heads), state=state))
        return np.frombuffer(answer, np.float32).reshape(tokens, heads[1] - heads[0], -1)

    return np.concatenate(await asyncio.gather(*(ask(rank, heads) for rank, heads in parts)), axis=1).tobytes()
