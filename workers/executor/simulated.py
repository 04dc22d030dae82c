"""An executor that sleeps instead of computing: a cost model gives the seconds, a formula the tokens.

Knows costs, plans and transports; needs no model and no torch. With the simulated transport it starts no thread and
touches no memory, so a whole cluster runs under a virtual clock. With a transport that moves bytes it fills its blocks
with a pattern computed from the tokens, so that digests and copies can be checked.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kvtransfer.digest import digest_cells
from kvtransfer.layout import DTYPE_BYTES, KVLayout
from kvtransfer.links import TransportSet
from kvtransfer.open import RESERVED_BLOCKS, LinkModel, SharedMemory, open_transports
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read, Region
from workers.config import CacheConfig, WorkerConfig
from workers.costs import CostModel
from workers.engine.block_store import BlockStore
from workers.engine.estimate import plan_seconds
from workers.engine.executor import ModelFacts, RemoteAttend, RunningDecodes, SpanQuery
from workers.engine.step import Chunk, Draw, StepPlan, StepResult
from workers.executor.bubble import BubbleMeter
from workers.executor.kv_sizing import blocks_in_use, host_cache_blocks
from workers.executor.simulated_disk import SimulatedDisk
from workers.executor.simulated_lending import SMOLLM2_CALLS as SMOLLM2_CALLS
from workers.executor.simulated_lending import AttentionCalls as AttentionCalls
from workers.executor.simulated_lending import SimulatedLender, ask_lenders, attention_of, local_part
from workers.executor.simulated_remote import SimulatedRemote
from workers.executor.simulated_remote import SimulatedRemoteServer as SimulatedRemoteServer
from workers.executor.simulated_steps import Observe as Observe
from workers.executor.simulated_steps import SimulatedSteps, simulated_tokens
from workers.request import Adapter, Grammar, TokenLogprobs


def simulated_token(key: str, position: int, vocab_size: int, never: tuple[int, ...] = ()) -> int:
    """The token that a simulated worker samples at `position` of the sequence; the same in every attempt of a request.

    Skips the tokens in `never` (the end tokens, so that a simulated answer ends by its length).
    """
    return simulated_tokens(key, position, 1, vocab_size, frozenset(never))[0]


CERTAIN = TokenLogprobs(chosen=0.0)
IDLE_S = 1.0  # as idle as the worker that computes the single requests of a profile, one after the other
# Waits for a step that takes this long on an idle device, with prompts or not; returns the seconds it took.
Pace = Callable[[float, bool], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """The model sizes of a simulated worker; the defaults are SmolLM2-135M's KV.

    `calls`: to a lender, for a step. `servers`: remote servers of KV by URL, which workers that are to share them get
    together. `observe` is called with every step. A step of prompts takes `idle_ratio` times as long after `IDLE_S`
    without steps. `pace` may stretch a step, for workers that share a device; steps then run one at a time.
    `multi_step`: steps that decode the same sequences run as one, and their tokens come late.
    """

    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    context_length: int = 4096
    vocab_size: int = 1000
    calls: AttentionCalls = SMOLLM2_CALLS
    servers: dict[str, SimulatedRemoteServer] = field(default_factory=dict)
    observe: Observe | None = None
    pace: Pace | None = None
    multi_step: bool = False
    idle_ratio: float = 1.0


def simulated_facts(block_size: int = 16, model: SimulatedModel | None = None) -> ModelFacts:
    """Facts of a model without weights; its KV takes 16 bytes per token unless `model` is given."""
    sizes = model or SimulatedModel(num_layers=1, num_kv_heads=1, head_dim=2)
    layout = KVLayout("simulated", sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, block_size, dtype=sizes.dtype)
    return ModelFacts(
        vocab_size=sizes.vocab_size,
        context_length=sizes.context_length,
        eos_token_ids=(0,),
        layout=layout,
    )


@dataclass(slots=True)
class _Running:
    """A plan in flight."""

    plan: StepPlan
    begin_s: float
    end_s: float
    seconds: float
    result: "asyncio.Future[StepResult]"


class SimulatedExecutor:
    """`Executor` by arithmetic. Without `fill` it writes nothing, and digests are zeros that are never compared.

    Each of the `depth` stages takes an equal part of a plan's seconds and processes one plan at a time, in order.
    """

    runs_ahead = False

    def __init__(
        self,
        facts: ModelFacts,
        cost: CostModel,
        transports: TransportSet,
        region: Region,
        model: SimulatedModel,
        *,
        fill: bool,
        cache: CacheConfig,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        has_multi_step = model.multi_step and depth == 1 and model.pace is None and not fill
        self.execute_decodes = self._execute_decodes if has_multi_step else None
        self._model = model
        self._attend: RemoteAttend | None = None
        self._lender = SimulatedLender(cost, self._is_busy)
        self._decodes: SimulatedSteps | None = None  # the latest
        self._cache = cache
        self._stores: tuple[SimulatedDisk | SimulatedRemote, ...] = ()
        self._last_s = -inf  # end of the latest step
        self.facts = facts
        self._cost = cost
        self._transports = transports
        self._region = region
        self._pattern = _Pattern(region) if fill else None
        heads, layers, *_ = region.layout.shape
        self._no_digests = bytes(8 * heads * layers)
        self._free_s = [0.0] * depth  # when each stage becomes free
        self._running: deque[_Running] = deque()
        self._order = asyncio.Lock()
        self._bubble = BubbleMeter(depth)

    @property
    def bubble_share(self) -> float:
        return self._bubble.share

    async def prepare(self, grammar: Grammar) -> None:
        """Nothing: simulated tokens have no text, so they match no grammar."""

    async def load_adapter(self, adapter: Adapter, drop: tuple[str, ...]) -> None:
        """Nothing: it costs no time here."""

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        if any(chunk.remote for chunk in plan.chunks):
            return self._execute_beside_lenders(plan)
        return self._execute(plan, plan_seconds(self._cost, plan))

    async def _execute_beside_lenders(self, plan: StepPlan) -> StepResult:
        """In each layer the device attends to what is here while it waits for lenders; here for all layers first."""
        assert self._attend is not None, "the engine plans remote KV only after `borrow`"
        loop, block_size = asyncio.get_running_loop(), self._region.layout.block_size
        begin_s = loop.time()
        lost = await ask_lenders(self._attend, self._model.calls, self._cost, plan, block_size)
        waited_s = loop.time() - begin_s
        local = local_part(plan, block_size)
        seconds = plan_seconds(self._cost, local)
        result = await self._execute(plan, seconds - min(waited_s, seconds, attention_of(self._cost, local)))
        tokens = tuple([None if index in lost else token for index, token in enumerate(result.tokens)])
        return structs.replace(result, tokens=tokens, lost=lost, seconds=waited_s + result.seconds)

    def _execute(self, plan: StepPlan, seconds: float) -> Awaitable[StepResult]:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        has_prompts = any(len(chunk.tokens) > 1 for chunk in plan.chunks)
        if begin_s > self._last_s + IDLE_S and has_prompts:
            seconds *= self._model.idle_ratio
        seconds += self._lender.take_lent()
        if num_swapped := len(plan.swap_out) + len(plan.swap_in):
            seconds += num_swapped * self._region.layout.block_bytes * self._cost.swap_byte_s
        if self._model.pace is not None:
            return self._paced(self._model.pace, plan, begin_s, seconds, has_prompts)
        end_s = self._through_stages(begin_s, seconds / self.depth)
        step = _Running(plan, begin_s, end_s, seconds, loop.create_future())
        self._running.append(step)
        loop.call_at(end_s, self._end_oldest)  # plans that end at the same time still end in order
        return step.result

    async def _paced(self, pace: Pace, plan: StepPlan, begin_s: float, seconds: float, has_prompts: bool) -> StepResult:
        async with self._order:
            seconds = await pace(seconds, has_prompts)
        return self._compute(plan, begin_s, asyncio.get_running_loop().time(), seconds)

    def _execute_decodes(self, plan: StepPlan, count: int, last: Callable[[], int]) -> RunningDecodes:
        self._decodes = SimulatedSteps(
            plan,
            count,
            asyncio.get_running_loop().time(),
            self._cost,
            lent_s=self._lender.take_lent(),
            observe=self._model.observe,
            last=last,
            finish=self._end_decodes,
            never=frozenset(self.facts.eos_token_ids),
            vocab_size=self.facts.vocab_size,
        )
        return self._decodes

    def _is_busy(self) -> bool:
        decodes = self._decodes is not None and not self._decodes.result.done()
        return bool(self._running) or decodes or self._order.locked()

    def _end_oldest(self) -> None:
        step = self._running.popleft()
        if step.result.done():  # the caller was cancelled
            return
        try:
            step.result.set_result(self._compute(step.plan, step.begin_s, step.end_s, step.seconds))
        except Exception as error:
            step.result.set_exception(error)

    def _end_decodes(self, plan: StepPlan, number: int, begin_s: float, end_s: float, seconds: float) -> StepResult:
        self._ended(plan, begin_s, end_s, seconds)
        return StepResult(number, (), (), ((),), seconds)

    def _ended(self, plan: StepPlan, begin_s: float, end_s: float, seconds: float) -> None:
        self._last_s = end_s
        if self._model.observe:
            self._model.observe(plan, (seconds,), (end_s,), ())
        self._bubble.add(begin_s, end_s, (seconds / self.depth,) * self.depth)

    def _compute(self, plan: StepPlan, begin_s: float, end_s: float, seconds: float) -> StepResult:
        self._ended(plan, begin_s, end_s, seconds)
        digests = (self._no_digests,) * len(plan.digest_blocks)
        if self._pattern is not None:
            self._pattern.move(plan)
            for chunk in plan.chunks:
                self._pattern.write(chunk)
            digests = digest_cells(self._region, plan.digest_blocks)
        tokens = tuple([self._token(chunk) for chunk in plan.chunks])
        logprobs = tuple([_logprobs(chunk.draw) for chunk in plan.chunks])
        scored = tuple([(CERTAIN,) * len(chunk.targets) for chunk in plan.chunks])
        return StepResult(
            number=plan.number,
            tokens=tokens,
            logprobs=logprobs,
            digests=(digests,),
            seconds=seconds,
            prompt_logprobs=scored,
        )

    @property
    def ticks(self) -> int:
        """Always grows: arithmetic does not hang."""
        return time.monotonic_ns()

    def stores(self, changed: Callable[[], None]) -> tuple[BlockStore, ...]:
        """The simulated disk and server, as far as `cache` has them."""
        disk, remote, layout = self._cache.disk, self._cache.remote, self._region.layout
        host = {} if self._pattern is None else self._pattern.host
        stores: list[SimulatedDisk | SimulatedRemote] = []
        if disk is not None:
            stores.append(SimulatedDisk(disk.size, layout.block_bytes, disk.speed, host, changed))
        if remote is not None:
            server = self._model.servers.setdefault(remote.url, SimulatedRemoteServer(remote.size, remote.speed))
            stores.append(SimulatedRemote(server, f"{remote.url} {layout}", layout.block_bytes, host, changed))
        self._stores = tuple(stores)
        return self._stores

    def shards(self) -> tuple[ShardAddress, ...]:
        return (self._transports.shard(),)

    async def connect(self, peer: PeerAddress, *, measures: bool = True) -> LinkReport:
        return await self._transports.connect(peer, measures=measures)

    def pull(self, order: PullOrder) -> Read:
        return self._transports.pull(order)

    async def forget(self, incarnation: str) -> None:
        await self._transports.forget(incarnation)

    def borrow(self, attend: RemoteAttend) -> None:
        self._attend = attend

    async def attend(self, blocks: tuple[int, ...], query: SpanQuery) -> bytes:
        await self._lender.attend(len(query.query), len(blocks) * self._region.layout.block_size)
        return b""

    async def failure(self) -> Exception:
        """Never returns: arithmetic does not fail."""
        never: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        for store in self._stores:
            store.close()
        await self._transports.close()

    def _through_stages(self, now_s: float, stage_s: float) -> float:
        """Add `stage_s` of work to every stage, one after the other. Returns when the last one ends."""
        for stage, free_s in enumerate(self._free_s):
            now_s = self._free_s[stage] = max(now_s, free_s) + stage_s
        return now_s

    def _token(self, chunk: Chunk) -> int | None:
        if chunk.draw is None:
            return None
        never = self.facts.eos_token_ids + chunk.draw.banned
        return simulated_token(chunk.key, chunk.draw.position, self.facts.vocab_size, never)


def open_simulated(
    config: WorkerConfig,
    facts: ModelFacts,
    cost: CostModel,
    incarnation: str,
    shared: SharedMemory | None = None,
    model: SimulatedModel | None = None,
) -> SimulatedExecutor:
    """A simulated executor with real transports over a small real pool, or with the simulated transport.

    Sizes are those of `facts`, and all else is as in `model`.
    """
    if facts.layout.block_size != config.engine.block_size:
        raise ValueError(
            f"{config.name}: engine.block_size is {config.engine.block_size}, the simulated KV has "
            f"{facts.layout.block_size} tokens a block"
        )
    fill = "simulated" not in config.transfer.backends
    kv_blocks = config.engine.kv_blocks or RESERVED_BLOCKS + blocks_in_use(config.engine, facts.context_length)
    host_blocks = host_cache_blocks(config.cache, facts.layout.block_bytes)
    facts = replace(facts, kv_blocks=kv_blocks, host_cache_blocks=host_blocks)
    region = _region(facts.layout, kv_blocks, fill)
    transports = open_transports(
        region,
        config.transfer.backends,
        incarnation=incarnation,
        secret=config.secret.encode(),
        host=config.transfer.host,
        quarantine_s=config.transfer.quarantine_s,
        max_readers=config.transfer.max_readers,
        shared=shared,
        model=LinkModel(cost.transfer_latency_s, 1 / max(cost.transfer_byte_s, 1e-15)),
    )
    return SimulatedExecutor(
        facts,
        cost,
        transports,
        region,
        model or SimulatedModel(),
        fill=fill,
        depth=config.parallel.pipeline,
        cache=config.cache,
    )


class _Pattern:
    """Fake K and V: each number depends on token, position, head, layer and dimension."""

    def __init__(self, region: Region) -> None:
        heads, layers, two, slots, dim = region.layout.shape
        kind = {4: np.uint32, 2: np.uint16, 1: np.uint8}[DTYPE_BYTES[region.layout.dtype]]
        self._blocks = np.frombuffer(region.bytes(), kind).reshape(region.num_blocks, heads, layers, two, slots, dim)
        self.host: dict[int, NDArray[np.unsignedinteger]] = {}  # host block -> swapped-out block
        self._ramp = np.arange(heads * layers * two * dim).reshape(heads, layers, two, dim)

    def move(self, plan: StepPlan) -> None:
        """Swaps and copies, as in a real pool."""
        self.host |= {host: self._blocks[block].copy() for block, host in plan.swap_out}
        for host, block in plan.swap_in:
            self._blocks[block] = self.host[host]
        for source, target in plan.copies:
            self._blocks[target] = self._blocks[source]

    def write(self, chunk: Chunk) -> None:
        slots = self._blocks.shape[4]
        for position, token in enumerate(chunk.tokens, chunk.first_position):
            numbers: NDArray[np.int64] = self._ramp + token * 65_537 + position * 31
            block = chunk.blocks[position // slots]
            self._blocks[block, :, :, :, position % slots] = numbers.astype(self._blocks.dtype)


def _region(layout: KVLayout, num_blocks: int, fill: bool) -> Region:
    # Zeroed lazily by the system: an unwritten pool costs no memory, and an unread one needs none.
    memory = np.zeros(num_blocks * layout.block_bytes if fill else 1, np.uint8)
    return Region(layout, num_blocks, memory.ctypes.data, memory)


def _logprobs(draw: Draw | None) -> TokenLogprobs | None:
    return None if draw is None or draw.params.logprobs is None else CERTAIN
