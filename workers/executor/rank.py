"""One rank: weights, KV memory, transports, and the one thread that computes.

Owns the memory and its order of release. Knows one step at a time; knows no queue and no lease. The event loop calls
and the compute thread works: only that thread calls torch, and it also digests the blocks it wrote. In a gang the rank
computes its part of the model, together with the ranks of its stage and after the previous stage.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs

from diptych.background_tasks import BackgroundTasks
from kvtransfer.digest import digest_cells
from kvtransfer.links import TransportSet
from kvtransfer.ticket import LinkReport, PeerAddress, Piece, ShardAddress
from kvtransfer.transport import PullOrder, Read
from workers.config import EngineConfig, ParallelConfig
from workers.engine.executor import ModelFacts, RemoteAttend, SpanQuery
from workers.engine.kv_event_log import Tier
from workers.engine.step import StepPlan, StepResult
from workers.errors import InvalidRequest
from workers.executor.adapters import RankAdapters
from workers.executor.cuda_graphs import DecodeGraphs
from workers.executor.device_sampler import sample_rows
from workers.executor.grammar_masks import NO_MASKS, GrammarMasks, StepMasks
from workers.executor.inputs import StepArrays, step_arrays
from workers.executor.kv_pool import KVPool
from workers.executor.rank_store import RankStore
from workers.executor.remote_kv import Lender, RemoteStates
from workers.executor.sampler import as_logprobs, log_probabilities
from workers.executor.threads import ComputeThread
from workers.executor.warm_up import compiling_steps, short_steps
from workers.model.decoder import Decoder
from workers.model.grammar import INSTALL
from workers.model.shard import ModelShard, shard_of
from workers.ops.collective import StageLink, TensorGroup
from workers.ops.completion import Event, wait
from workers.ops.lora import StepAdapters
from workers.ops.staging import to_device, to_host
from workers.request import Adapter, Grammar, TokenLogprobs

logger = logging.getLogger(__name__)

MASKS_TIMEOUT_S = 60.0  # never reached: a mask is bounded by `workers.model.grammar.LIMITS`
SLICE_BYTES = 32 << 20  # of logits at a time for prompt logprobs; scoring them takes as much again


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a rank computes and with which groups: a whole model alone, or its shard in a gang."""

    model: Decoder
    group: TensorGroup | None = None  # None: no other rank shares its layers
    link: StageLink | None = None  # None: one stage
    graphs: DecodeGraphs | None = None  # of a whole model on a GPU
    shard: ModelShard | None = None  # None: the whole model
    adapters: RankAdapters | None = None  # None: of a part that is only measured

    def close(self) -> None:
        for each in (self.group, self.link):
            if each is not None:
                each.close()


class Rank:
    """The `Executor` of a worker of one rank, or one rank of a gang, whose executor closes it.

    `close` ends the transports first, so that no more bytes arrive, then the thread, then frees the memory.
    """

    depth = 1
    bubble_share = 0.0
    execute_decodes = None

    def __init__(
        self,
        facts: ModelFacts,
        part: ModelPart,
        pool: KVPool,
        transports: TransportSet,
        thread: ComputeThread,
        stores: Iterable[RankStore] = (),
        masks: GrammarMasks | None = None,
    ) -> None:
        """`masks` None: this rank does not sample, or grammars are not installed."""
        self.facts = facts
        # On a CPU a step takes long: prompts that arrive should not wait for two.
        self.runs_ahead = pool.region.device != "cpu"
        self.caches = {store.tier: store for store in stores}
        self._masks = masks
        self._part = part
        self._pool = pool
        self._transports = transports
        self._thread = thread
        self._tasks = BackgroundTasks()
        self._shard = part.shard or shard_of(part.model.config, ParallelConfig(), 0)
        self._lender = Lender(part.model, self._shard, pool.blocks)
        self._remote_attend: RemoteAttend | None = None
        self._sampled: dict[str, int | None] = {}  # by the last step, for each sequence; the compute thread's

    def borrow(self, attend: RemoteAttend) -> None:
        self._remote_attend = attend

    async def attend(self, blocks: tuple[int, ...], query: SpanQuery) -> bytes:
        return await self._lender.attend(blocks, query)

    def _states(self, plan: StepPlan) -> RemoteStates | None:
        """None: no chunk has KV on another worker."""
        if not any(chunk.remote for chunk in plan.chunks):
            return None
        assert self._remote_attend is not None, "a plan with remote KV comes after `borrow`"
        block_size = self._pool.region.layout.block_size
        return RemoteStates(plan, self._part.model.config, self._shard, block_size, self._remote_attend)

    async def prepare(self, grammar: Grammar) -> None:
        if self._masks is None:
            raise InvalidRequest("sampling.grammar", f"a worker has no structured output; {INSTALL}")
        await asyncio.wrap_future(self._masks.prepare(grammar))

    async def load_adapter(self, adapter: Adapter, drop: tuple[str, ...]) -> None:
        assert self._part.adapters is not None
        await self._part.adapters.load(adapter, drop)

    async def execute(self, plan: StepPlan) -> StepResult:
        """A rank that fails in a step leaves its gang: peers would take its next messages for this step's."""
        states = self._states(plan)
        masks = self._masks.begin(plan) if self._masks is not None else None
        arrays = step_arrays(plan, self._pool.region.layout.block_size) if plan.chunks else None
        adapters = None
        if arrays is not None and arrays.adapters:
            assert self._part.adapters is not None
            adapters = self._part.adapters.of_step(arrays)

        def step() -> StepResult:
            try:
                if arrays is not None:
                    arrays.fill(lambda place: self._sampled[plan.chunks[place].key] or 0)  # None: its sequence fails
                done = compute(self._part, self._pool, plan, states, arrays, masks, adapters)
                self._sampled = dict(zip([chunk.key for chunk in plan.chunks], done.tokens, strict=True))
                return done
            except BaseException:
                self._part.close()
                raise

        return await self._thread.run(step)

    def warm_up_steps(self, engine: EngineConfig, context_length: int) -> tuple[StepPlan, ...]:
        """What an executor computes before its worker is ready. Nothing is compiled or captured on a CPU."""
        if self._pool.region.device == "cpu":
            return short_steps(engine)
        graphs = self._part.graphs
        return compiling_steps(engine, context_length, graphs.buckets if graphs is not None else ())

    @property
    def ticks(self) -> int:
        """Grows while a step makes progress. A GPU computes asynchronously: there it always grows."""
        if self._pool.region.device != "cpu":
            return time.monotonic_ns()
        return self._part.model.ticks

    def stores(self, changed: Callable[[], None]) -> tuple[RankStore, ...]:
        for cache in self.caches.values():
            cache.changed = changed
        return tuple(self.caches.values())

    async def write_block(self, tier: Tier, block_hash: bytes, prefix: int | None, block: int) -> bool:
        return await self.caches[tier].written(block_hash, prefix, block)

    async def read_block(self, tier: Tier, block_hash: bytes, block: int, timeout_s: float) -> bool:
        return await self.caches[tier].arrived(block_hash, block, timeout_s)

    def shard(self) -> ShardAddress:
        return self._transports.shard()

    def shards(self) -> tuple[ShardAddress, ...]:
        return (self.shard(),)

    async def connect(self, peer: PeerAddress, measures: bool = True) -> LinkReport:
        return await self._transports.connect(peer, measures=measures)

    def pull(self, order: PullOrder) -> Read:
        """As `TransportSet.pull`; the blocks of a failed read are zeroed before it counts as settled."""
        read = self._transports.pull(order)
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(_: "asyncio.Future[None]") -> None:
            arrived = read.done.done() and not read.done.cancelled() and read.done.exception() is None
            if not arrived:
                self._tasks.start(self._zero_blocks(order.target_blocks, settled))
            elif not settled.done():
                settled.set_result(None)

        read.settled.add_done_callback(settle)
        return Read(read.done, settled)

    async def _zero_blocks(self, blocks: tuple[int, ...], settled: "asyncio.Future[None]") -> None:
        try:
            await self._thread.run(lambda: self._pool.zero_blocks(blocks))
        except Exception:  # a lost device fails the next step too
            logger.exception("blocks %s could not be zeroed", blocks)
        finally:
            if not settled.done():
                settled.set_result(None)

    async def forget(self, incarnation: str) -> None:
        await self._transports.forget(incarnation)

    async def failure(self) -> Exception:
        """Never returns: errors come from `execute`."""
        never: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        return await never

    def abort(self) -> None:
        """Stop waiting for other ranks: their gang is lost. Beside the event loop, since NCCL may take long."""
        self._tasks.start(asyncio.to_thread(self._part.close))

    async def close(self) -> None:
        try:
            await self._transports.close()
            await asyncio.gather(*self._tasks)
            await self._lender.close()
            for cache in self.caches.values():
                await cache.close()
        finally:
            await self._thread.run(self._part.close)
            await self._thread.close()
            if self._masks is not None:
                self._masks.close()


@torch.inference_mode()
def compute(
    part: ModelPart,
    pool: KVPool,
    plan: StepPlan,
    states: RemoteStates | None = None,
    arrays: StepArrays | None = None,
    masks: "Future[StepMasks] | None" = None,
    adapters: Callable[[], StepAdapters] | None = None,
) -> StepResult:
    """Run the plan on the calling thread: write the KV of all chunks, and sample one token per chunk with a draw.

    `arrays`: of the plan, if they are made already. `states`: of chunks with KV on other workers. `masks`: of sequences
    with grammars. `adapters`: brings those of the plan to the device. Returns when the KV is in the pool for every
    reader. Only the first rank of the last stage returns tokens and log probabilities.
    """
    begun = time.perf_counter()
    pool.move(plan)
    part.model.ticks += 1
    nothing = (None,) * len(plan.chunks)
    result, written = StepResult(plan.number, nothing, nothing, (), 0.0), None
    if plan.chunks:
        arrays = arrays or step_arrays(plan, pool.region.layout.block_size)
        result, written = _forward(part, pool, plan, result, arrays, states, masks, adapters)
    lost = tuple(sorted(states.lost)) if states is not None else ()
    part.model.ticks += 1
    digests = _digests(pool, plan.digest_blocks)
    wait(written or pool.record_event())
    return structs.replace(
        result,
        tokens=tuple([None if index in lost else token for index, token in enumerate(result.tokens)]),
        logprobs=tuple([None if index in lost else found for index, found in enumerate(result.logprobs)]),
        digests=(digests,),
        seconds=time.perf_counter() - begun,
        wait_s=part.link.take_wait_s() if part.link else 0.0,
        comm_s=part.group.take_comm_s() if part.group else 0.0,
        lost=lost,
    )


def _forward(
    part: ModelPart,
    pool: KVPool,
    plan: StepPlan,
    nothing: StepResult,
    arrays: StepArrays,
    states: RemoteStates | None,
    masks: "Future[StepMasks] | None",
    adapters: Callable[[], StepAdapters] | None,
) -> tuple[StepResult, Event | None]:
    """What the chunks give (`nothing`, if another stage has the logits), and an event after all KV if they sample."""
    model, link = part.model, part.link
    chunks = [index for index, chunk in enumerate(plan.chunks) if chunk.draw is not None]
    draws = [chunk.draw for chunk in plan.chunks if chunk.draw is not None]
    pools = any([chunk.pooling for chunk in plan.chunks])
    result, written = nothing, None
    logits = part.graphs.logits(arrays) if part.graphs is not None and not pools else None
    if logits is None:
        inputs = arrays.tensors(to_device(arrays.all, model.device))
        if model.embedding is not None:
            x = model.embed(inputs.tokens)
        else:
            assert link is not None, "a later stage has a previous one"
            x = link.receive((len(inputs.tokens), model.config.hidden_size), model.dtype, model.device)
        changes = None if adapters is None else adapters()
        hidden = model.run(x, inputs.positions, inputs.rows, inputs.batch, pool.blocks, states, changes)
        if model.head is None:
            assert link is not None, "an earlier stage has a next one"
            link.send(hidden)
            return nothing, None
        logits = model.logits(hidden[: len(draws)]) if draws else None
        if len(hidden) > len(draws):
            scored = _prompt_logprobs(model, hidden[len(draws) :], plan)
            result = structs.replace(result, prompt_logprobs=scored)
        if pools:
            result = structs.replace(result, pooled=_pooled(hidden, len(draws), plan))
    if logits is not None:
        written = pool.record_event()  # has passed when the tokens are here; to wait for an event means to sleep
        tokens, logprobs = list(nothing.tokens), list(nothing.logprobs)
        found = masks.result(MASKS_TIMEOUT_S) if masks is not None else NO_MASKS
        allowed = {row: found.masks[chunk] for row, chunk in enumerate(chunks) if chunk in found.masks}
        for chunk, token, logprob in zip(chunks, *sample_rows(logits, draws, allowed), strict=True):
            is_stuck = chunk in found.stuck
            tokens[chunk], logprobs[chunk] = (None, None) if is_stuck else (token, logprob)
        result = structs.replace(
            result,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            stuck=tuple(found.stuck.items()),
            forced=found.forced(tokens),
        )
    return result, written


def _prompt_logprobs(model: Decoder, hidden: torch.Tensor, plan: StepPlan) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Log probabilities of each chunk's targets, from hidden states [targets, hidden]."""
    is_scored = [not chunk.pooling for chunk in plan.chunks for _ in chunk.targets]
    if not all(is_scored):
        (rows,) = to_device([np.flatnonzero(is_scored)], hidden.device)
        hidden = hidden[rows]
    scored = [() if chunk.pooling else chunk.targets for chunk in plan.chunks]
    targets = [target for each in scored for target in each]
    tops = [chunk.num_top for chunk, each in zip(plan.chunks, scored, strict=True) for _ in each]
    (tokens,) = to_device([np.array(targets)], hidden.device)
    slice_rows = max(1, SLICE_BYTES // (4 * model.config.vocab_size))
    parts = [slice(start, start + slice_rows) for start in range(0, len(targets), slice_rows)]
    found: list[torch.Tensor] = []  # three of each part
    for part in parts:
        model.ticks += 1
        logits = model.logits(hidden[part])
        if logits is not None:  # only the first rank of the stage has them
            found += log_probabilities(logits.float(), tokens[part], max(tops[part]))
    if not found:
        return ()
    on_host = to_host(found)
    each = itertools.chain.from_iterable(
        as_logprobs(on_host[3 * index : 3 * index + 3], tops[part]) for index, part in enumerate(parts)
    )
    return tuple(tuple(itertools.islice(each, len(targets))) for targets in scored)


def _pooled(hidden: torch.Tensor, num_drawn: int, plan: StepPlan) -> tuple[tuple[bytes, ...], ...]:
    """The sum of each pooling chunk's rows in the hidden states: its drawn row, and those of its targets."""
    drawn = iter(torch.split(hidden[:num_drawn], 1))
    others = torch.split(hidden[num_drawn:], [len(chunk.targets) for chunk in plan.chunks])
    sums: dict[int, torch.Tensor] = {}
    for index, (chunk, rows) in enumerate(zip(plan.chunks, others, strict=True)):
        rows = torch.cat([rows, next(drawn)]) if chunk.draw is not None else rows
        if chunk.pooling and len(rows):
            sums[index] = rows.float().sum(dim=0)  # [hidden]
    found = dict(zip(sums, to_host(list(sums.values())), strict=True))
    return tuple((found[index].numpy().tobytes(),) if index in found else () for index in range(len(plan.chunks)))


def _digests(pool: KVPool, blocks: tuple[tuple[int, int], ...]) -> tuple[bytes, ...]:
    """A GPU makes them behind the step's kernels, in their queue."""
    if not blocks:
        return ()
    layout = pool.region.layout
    blocks = tuple([(block, layout.digested_tokens(slots)) for block, slots in blocks])
    if pool.region.device_bytes is None:
        return digest_cells(pool.region, blocks)
    from workers.ops.triton_digest import cell_digests  # only where Triton is installed

    rows = [[(block, 0, slots)] for block, slots in blocks]
    whole = Piece(0, layout.heads, layout.layers)
    digests = cell_digests(pool.memory, layout, whole, rows).to("cpu", non_blocking=True)
    wait(pool.record_event())
    return tuple(row.tobytes() for row in digests.numpy())
