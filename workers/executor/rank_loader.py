"""Builds one rank from a configuration: folder, shard, model, pool, transports, thread.

Knows no schedule and no leader. A rank of a gang differs from a worker of one rank only by its shard and its groups.
"""

import asyncio
import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import psutil
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvtransfer.layout import KVLayout
from kvtransfer.open import RESERVED_BLOCKS, SharedMemory, open_transports
from workers.config import EngineConfig, WorkerConfig
from workers.engine.executor import ModelFacts
from workers.errors import RankLost
from workers.executor.adapters import RankAdapters
from workers.executor.cuda_graphs import DecodeGraphs, cuda_capture, cuda_memory_use, graph_bytes, has_graphs
from workers.executor.grammar_masks import GrammarMasks
from workers.executor.kv_pool import KVPool, allocate_pool, memory_of
from workers.executor.kv_sizing import (
    GIB,
    DeviceMemory,
    blocks_in_use,
    check_blocks,
    default_host_cache_blocks,
    host_cache_blocks,
    longest_context,
    spare_share,
)
from workers.executor.rank import ModelPart, Rank, compute
from workers.executor.rank_spec import Rendezvous, sampling_rank
from workers.executor.rank_store import RankStore, open_disk_cache, open_remote_cache
from workers.executor.threads import ComputeThread, usable_cores
from workers.executor.warm_up import deepest_step, fullest_step, warm_up
from workers.model.config import ModelConfig, read_model_config
from workers.model.content import content_id
from workers.model.folder import ModelFolder, tokenizer_id
from workers.model.grammar import GrammarCompiler, grammar_compiler, has_grammars
from workers.model.kv_layers import kv_layout, kv_range, min_block_size
from workers.model.load import load_decoder
from workers.model.shard import shard_of
from workers.ops.attention import best_attention
from workers.ops.collective import StageLink, TensorGroup, open_groups
from workers.ops.narrow import multiplies_bfloat16, torch_dtype

logger = logging.getLogger(__name__)

MEET_TIMEOUT_S = 60.0  # for all ranks of a gang to meet
LOAD_TIMEOUT_S = 600.0  # for all ranks to load their parts
OPEN_STORES: tuple[Callable[[WorkerConfig, KVPool], RankStore | None], ...] = (open_disk_cache, open_remote_cache)
COLLECTIVE_TIMEOUT_S = 100.0  # for the other ranks to reach the same point of a step; below `STEP_TIMEOUT_S`


async def open_rank(
    config: WorkerConfig,
    folder: ModelFolder,
    incarnation: str,
    shared: SharedMemory | None,
    rendezvous: Rendezvous | None = None,
) -> Rank:
    """Load the model, allocate its KV and open its transports, off the event loop. Close the rank to free them.

    `shared` connects workers of one process through the "memory" backend; `rendezvous` is None for a worker of one
    rank. Raises `ModelError` (model or memory), `KVStoreError` (a store of its cache), `TransportUnavailable` (no
    backend works), `RankLost` (another rank did not join).
    """
    rank = rendezvous.rank if rendezvous else 0
    device = choose_device(config.engine.device, rank)
    # The event loop's few torch calls need no OpenMP threads, which would compete with the compute thread.
    torch.set_num_threads(1)
    name = config.name if rendezvous is None else f"{config.name}/rank-{rank}"
    thread = ComputeThread(name, config.engine.threads or config.cpus, config.engine.cores)
    groups: ModelPart | None = None
    stores: list[RankStore] = []
    samples = rank == sampling_rank(config.parallel)
    try:
        grammars = asyncio.ensure_future(asyncio.to_thread(_grammar_compiler, folder)) if samples else None
        facts, part, pool = await thread.run(lambda: _Loader(config, folder, device, rendezvous).load())
        groups = part
        compiler = None if grammars is None else await grammars
        for open_store in OPEN_STORES:
            if (store := await asyncio.to_thread(open_store, config, pool)) is not None:
                stores.append(store)
        transports = open_transports(
            pool.region,
            config.transfer.backends,
            incarnation=incarnation,
            secret=config.secret.encode(),
            host=config.transfer.host,
            quarantine_s=config.transfer.quarantine_s,
            max_readers=config.transfer.max_readers,
            rank=rank,
            shared=shared,
            place=pool.place,
        )
    except BaseException:
        if groups is not None:
            groups.close()
        for store in stores:
            await store.close()
        await thread.close()
        raise
    num_threads = max(1, len(usable_cores()) // 4)
    masks = None if compiler is None else GrammarMasks(compiler, facts.vocab_size, num_threads)
    return Rank(facts, part, pool, transports, thread, stores, masks)


async def close_opened(opening: "asyncio.Future[Rank]", whole: bool) -> None:
    """Close what `open_rank` opens, once it has. `whole`: no other rank of its gang is lost, so none is waited for."""
    await asyncio.wait([opening])
    if opening.cancelled() or opening.exception() is not None:
        return
    rank = opening.result()
    if not whole:
        rank.abort()
    await rank.close()


async def open_solo(
    config: WorkerConfig, folder: ModelFolder, incarnation: str, shared: SharedMemory | None = None
) -> Rank:
    """The executor of a worker of one rank, warmed up. See `open_rank` for arguments and errors."""
    rank = await open_rank(config, folder, incarnation, shared)
    try:
        await warm_up(config.name, rank.execute, rank.warm_up_steps(config.engine, rank.facts.context_length))
    except BaseException:
        await rank.close()
        raise
    return rank


def _grammar_compiler(folder: ModelFolder) -> GrammarCompiler | None:
    """None: grammars are not installed, or do not know this tokenizer. Loaded now: it holds the GIL for a second."""
    if not has_grammars():
        return None
    try:
        return grammar_compiler(folder.path)
    except Exception as error:  # the Rust code raises a bare Exception too
        logger.warning("%s: no structured output: its tokenizer is not usable: %s", folder.name, error)
        return None


class _Loader:
    """Loads one rank's part of a model and allocates its KV, on the compute thread.

    `engine.dtype` is the KV's dtype; weights have it too on a GPU, and `engine.weights` on a CPU.
    """

    def __init__(
        self, config: WorkerConfig, folder: ModelFolder, device: torch.device, rendezvous: Rendezvous | None
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: Triton's kernels run on the current device
        self._folder = folder
        self._device = device
        self._is_host = device.type == "cpu"
        self._shape = read_model_config(folder.path)
        self._engine = replace(config.engine, dtype=kv_dtype(config.engine.dtype, device, self._shape.dtype))
        self._config = replace(config, engine=self._engine)
        self._rank = rendezvous.rank if rendezvous else 0
        self._shard = shard_of(self._shape, config.parallel, self._rank)
        self._store: TCPStore | None = None  # where the ranks of a gang find each other
        if rendezvous is not None:
            timeout = timedelta(seconds=MEET_TIMEOUT_S)
            self._store = TCPStore(rendezvous.store_host, rendezvous.store_port, is_master=False, timeout=timeout)

    def load(self) -> tuple[ModelFacts, ModelPart, KVPool]:
        group, link = None, None
        if self._store is not None:
            host, parallel = self._config.transfer.host, self._config.parallel
            group, link = open_groups(self._store, parallel, self._rank, self._device, host, COLLECTIVE_TIMEOUT_S)
        try:
            return self._load(group, link)
        except BaseException as error:
            for each in (group, link):
                if each is not None:
                    each.close()
            self._store = None
            traceback.clear_frames(error.__traceback__)  # a kept log record would keep the store open
            raise

    def _load(self, group: TensorGroup | None, link: StageLink | None) -> tuple[ModelFacts, ModelPart, KVPool]:
        config, engine, shape, device = self._config, self._engine, self._shape, self._device
        if engine.weights == "bfloat16" and not multiplies_bfloat16():
            logger.warning(
                "%s: engine.weights is bfloat16, but this CPU has no instructions for it (AVX512_BF16 or AMX); weights "
                "are widened to float32 as they are read, which is no faster once many tokens share a step",
                config.name,
            )
        dtype = torch_dtype(engine.dtype)
        heads = shape.num_heads // shape.num_kv_heads, shape.head_dim
        model = load_decoder(
            self._folder,
            device,
            dtype,
            attention=best_attention(device, dtype, engine.deterministic, 1 if shape.latent else 2, heads),
            weight_format=engine.weights,
            deterministic=engine.deterministic,
            shard=self._shard,
            group=group,
        )
        facts = model_facts(self._folder, shape, engine)
        facts = replace(facts, host_cache_blocks=host_cache_blocks(config.cache, facts.layout.block_bytes))
        if engine.block_size < (least := min_block_size(shape, engine.dtype)):
            logger.warning(
                "%s: engine.block_size %d: a block takes %.1f MiB, most of it state of linear attention; with %d or "
                "more a layer's state takes no more than KV would",
                config.name, engine.block_size, facts.layout.block_bytes / 2**20, least,
            )  # fmt: skip
        layers = kv_range(shape, facts.layout, self._shard.layers)
        layout = replace(facts.layout, layers=layers, heads=self._shard.kv_heads)
        adapters = RankAdapters(self._folder, self._shard, device, model.dtype, deterministic=engine.deterministic)
        if device.type == "cuda":
            adapters.compile()
        part = ModelPart(model, group, link, shard=self._shard, adapters=adapters)
        is_captured = device.type == "cuda" and engine.cuda_graphs and self._store is None and has_graphs(model)
        if not engine.kv_blocks:
            facts = replace(facts, kv_blocks=self._chosen_blocks(facts, part, layout, is_captured=is_captured))
        kv_blocks = engine.kv_blocks or facts.kv_blocks
        if has_default_host_cache(config, device):
            free_bytes, _ = memory_of(torch.device("cpu"))
            proposed = default_host_cache_blocks(free_bytes, layout.block_bytes, kv_blocks)
            facts = replace(facts, host_cache_blocks=self._fewest("blocks of host memory", proposed))
        spare = spare_share(engine.gpu_memory_utilization, is_host=self._is_host)
        num_blocks = kv_blocks + is_captured
        pool = allocate_pool(layout, num_blocks, device, facts.host_cache_blocks, config.staging_bytes, spare=spare)
        if is_captured:
            longest = longest_context(engine, facts.context_length)
            part = replace(part, graphs=_graphs(part, pool, engine, min(longest, kv_blocks * engine.block_size)))
        return facts, part, pool

    def _chosen_blocks(self, facts: ModelFacts, part: ModelPart, layout: KVLayout, *, is_captured: bool) -> int:
        """Blocks of a pool without `kv_blocks`: what fits on the rank with the least room. Raises `ModelError`.

        `is_captured`: the rank's decodes replay CUDA graphs.
        """
        config, engine, device, context_length = self._config, self._engine, self._device, facts.context_length
        other_bytes = config.staging_bytes
        if self._is_host:
            free_bytes, total_bytes = memory_of(device)
            memory = DeviceMemory(total_bytes, free_bytes, psutil.Process().memory_info().rss)
            other_bytes += facts.host_cache_blocks * layout.block_bytes
        else:
            self._fewest("loaded weights", 0)  # all have: a step's first sum does not wait as long as a load may take
            step_bytes, of_graphs = _measured(part, layout, device, engine, context_length, is_captured=is_captured)
            free_bytes, total_bytes = memory_of(device)
            memory = DeviceMemory(total_bytes, free_bytes, torch.cuda.memory_allocated(device), step_bytes, of_graphs)
            sizes = [each / GIB for each in (total_bytes, free_bytes, memory.weight_bytes, step_bytes, of_graphs)]
            text = "%s: %.2f GiB, %.2f of them free; weights take %.2f, a step %.2f, CUDA graphs %.2f"
            logger.info(text, config.name, *sizes)
        kv_bytes = memory.kv_bytes(engine.gpu_memory_utilization, config.memory_part, is_host=self._is_host)
        blocks = max(0, (kv_bytes - other_bytes) // layout.block_bytes - RESERVED_BLOCKS)
        if self._is_host:
            blocks = min(blocks, blocks_in_use(engine, context_length))
        blocks = self._fewest("KV blocks", blocks)
        check_blocks(blocks, engine, context_length, layout.block_bytes, str(device))
        tokens, gib = blocks * layout.block_size, blocks * layout.block_bytes / GIB
        logger.info("%s: %d KV blocks (%d tokens, %.2f GiB on %s)", config.name, blocks, tokens, gib, device)
        return blocks + RESERVED_BLOCKS

    def _fewest(self, what: str, blocks: int) -> int:
        """The smallest number of blocks that a rank of the gang proposes. Raises `RankLost`."""
        if (store := self._store) is None:
            return blocks
        try:
            store.set_timeout(timedelta(seconds=LOAD_TIMEOUT_S))
            place = store.add(f"{what}/proposed", 1) - 1
            store.set(f"{what}/{place}", str(blocks))
            return min(int(store.get(f"{what}/{each}")) for each in range(self._config.parallel.world_size))
        except RuntimeError as error:
            raise RankLost(f"not all ranks reported their {what}: {str(error).splitlines()[0]}") from error


def has_default_host_cache(config: WorkerConfig, device: torch.device) -> bool:
    """Whether the worker itself chooses how much host memory caches what the device evicts."""
    return device.type == "cuda" and config.cache.host is None and config.engine.prefix_caching


def _measured(
    part: ModelPart,
    layout: KVLayout,
    device: torch.device,
    engine: EngineConfig,
    context_length: int,
    *,
    is_captured: bool,
) -> tuple[int, int]:
    """Bytes on a GPU: the peak of a step's activations, and CUDA graphs. All ranks of a gang compute the same steps.

    Over a pool of scratch blocks, since graphs hold the addresses of theirs: those that a worker uses are captured
    again after the pool is allocated.
    """
    pool = allocate_pool(layout, RESERVED_BLOCKS, device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    longest = longest_context(engine, context_length)
    for plan in (fullest_step(engine, context_length), deepest_step(engine, longest)):
        compute(part, pool, plan)
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    of_graphs = 0
    if is_captured:
        open_graphs = partial(_graphs, part, pool, engine, longest)
        of_graphs = graph_bytes(open_graphs, partial(cuda_memory_use, device))
        del open_graphs
    del pool
    torch.cuda.empty_cache()
    return step_bytes, of_graphs


def _graphs(part: ModelPart, pool: KVPool, engine: EngineConfig, longest: int) -> DecodeGraphs:
    return DecodeGraphs(part.model, pool.blocks, engine.max_running, longest, cuda_capture())


def model_facts(folder: ModelFolder, model: ModelConfig, engine: EngineConfig) -> ModelFacts:
    """What the worker must know of the folder's model under this configuration.

    Each weight format counts as a model of its own, since its KV differs.
    """
    content = content_id(folder)
    weights = content if engine.weights == "float32" else f"{content}-{engine.weights}"
    layout = kv_layout(model, weights, engine.block_size, engine.dtype)
    return ModelFacts(
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        eos_token_ids=model.eos_token_ids,
        layout=layout,
        tokenizer=tokenizer_id(folder),
        default_sampling=model.generation.over(folder.recommended).given(),
    )


def kv_dtype(name: str, device: torch.device, stored: str) -> str:
    """The dtype for `engine.dtype`, of a model whose weights are `stored` in another perhaps."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "float32"
    return "float16" if stored == "float16" else "bfloat16"


def choose_device(name: str, rank: int) -> torch.device:
    """The device for `engine.device`; "auto" spreads the ranks of a process over its GPUs, if it has any."""
    if name == "auto":
        visible = torch.cuda.device_count()
        return torch.device("cuda", rank % visible) if visible else torch.device("cpu")
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)
