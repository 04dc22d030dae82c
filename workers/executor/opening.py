"""One rank from a configuration: folder, shard, model, pool, transports, thread.

Composes; knows no schedule and no leader. What is loaded in a gang's rank differs from a worker of one rank only by its
shard and by the group that it meets.
"""

import logging
from dataclasses import replace
from datetime import timedelta

import torch
from msgspec import structs
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvtransfer.layout import KVLayout
from kvtransfer.open import SharedMemory, open_transports
from kvtransfer.probe import SCRATCH_BLOCK
from workers.config import EngineConfig, WorkerConfig
from workers.engine.executor import ModelFacts
from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor.kv_pool import KVPool, allocate_pool
from workers.executor.order import Seat
from workers.executor.rank import ModelPart, Rank
from workers.executor.threads import ComputeThread
from workers.model.config import ModelConfig, read_model_config
from workers.model.content import content_id
from workers.model.folder import ModelFolder, count_parameters, tokenizer_id
from workers.model.load import load_decoder
from workers.model.shard import ModelShard, shard_of
from workers.ops.attention import best_attention
from workers.ops.collective import StageLink, TensorGroup, open_groups
from workers.ops.narrow import multiplies_bfloat16
from workers.request import SamplingParams

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 80  # enough rows for the linears of large batches
MEET_TIMEOUT_S = 60.0  # for all ranks of a gang to meet
COLLECTIVE_TIMEOUT_S = 100.0  # for the others to come to the same point of a step; below the pump's bound of a step


async def open_rank(
    config: WorkerConfig,
    folder: ModelFolder,
    incarnation: str,
    shared: SharedMemory | None = None,
    seat: Seat | None = None,
) -> tuple[ModelFacts, Rank]:
    """Load the model, allocate its KV and open its transports, off the event loop. Close the rank, or all that stays.

    `shared` joins workers of one process for the "memory" backend; `seat` is None for a worker of one rank, whose
    facts are the same as those of any rank. Raises `ModelError` (model or memory), `TransportUnavailable` (no backend
    works), `RankLost` (another rank did not come).
    """
    rank = seat.rank if seat else 0
    device = choose_device(config.engine.device, rank)
    # The event loop's own few torch calls need no team of threads, which would spin beside the one that computes.
    torch.set_num_threads(1)
    name = config.name if seat is None else f"{config.name}/rank-{rank}"
    thread = ComputeThread(name, config.engine.threads or config.cpus, config.engine.cores)
    groups: ModelPart | None = None
    try:
        facts, part, pool = await thread.run(lambda: _load(config, folder, device, seat))
        groups = part
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
        await thread.close()
        raise
    return facts, Rank(part, pool, transports, thread)


def _load(
    config: WorkerConfig, folder: ModelFolder, device: torch.device, seat: Seat | None
) -> tuple[ModelFacts, ModelPart, KVPool]:
    """`engine.dtype` is the KV's; weights follow it on a GPU and are `engine.weights` on a CPU."""
    shape = read_model_config(folder.path)
    shard = shard_of(shape, config.parallel, seat.rank if seat else 0)
    group, link = _meet(config, device, seat)
    try:
        return _load_shard(config, folder, shape, device, shard, group, link)
    except BaseException:
        for each in (group, link):
            if each is not None:
                each.close()
        raise


def _meet(config: WorkerConfig, device: torch.device, seat: Seat | None) -> tuple[TensorGroup | None, StageLink | None]:
    """The other ranks of our stage, and our neighbours among the stages."""
    if seat is None:
        return None, None
    store = TCPStore(seat.store_host, seat.store_port, is_master=False, timeout=timedelta(seconds=MEET_TIMEOUT_S))
    host = config.transfer.host
    return open_groups(store, config.parallel, seat.rank, device, host, COLLECTIVE_TIMEOUT_S)


def _load_shard(
    config: WorkerConfig,
    folder: ModelFolder,
    shape: ModelConfig,
    device: torch.device,
    shard: ModelShard,
    group: TensorGroup | None,
    link: StageLink | None,
) -> tuple[ModelFacts, ModelPart, KVPool]:
    engine = config.engine
    if engine.weights == "bfloat16" and not multiplies_bfloat16():
        logger.warning(
            "%s: engine.weights is bfloat16, but this CPU has no instructions for it (AVX512_BF16 or AMX); weights are "
            "widened to float32 as they are read, which is no faster once many tokens share a step",
            config.name,
        )
    dtype: torch.dtype = getattr(torch, engine.dtype)
    model = load_decoder(
        folder,
        device,
        dtype,
        attention=best_attention(device, dtype, engine.deterministic),
        weight_format=engine.weights,
        deterministic=engine.deterministic,
        shard=shard,
        group=group,
    )
    facts = model_facts(folder, shape, engine, model.dtype.itemsize)
    layout = replace(facts.layout, layers=shard.layers, heads=shard.kv_heads)
    pool = allocate_pool(layout, engine.kv_blocks, device, engine.host_blocks, config.staging_bytes)
    return facts, ModelPart(model, group, link), pool


def model_facts(folder: ModelFolder, model: ModelConfig, engine: EngineConfig, dtype_bytes: int) -> ModelFacts:
    """What the worker must know of the folder's model under this configuration.

    Weights in another format make another model of it: its KV fits only to its like.
    """
    content = content_id(folder)
    layout = KVLayout(
        model=content if engine.weights == "float32" else f"{content}-{engine.weights}",
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=engine.block_size,
        dtype=engine.dtype,
    )
    num_parameters = count_parameters(folder)
    return ModelFacts(
        name=folder.name,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        eos_token_ids=model.eos_token_ids,
        layout=layout,
        num_parameters=num_parameters,
        weight_bytes=num_parameters * dtype_bytes,
        tokenizer=tokenizer_id(folder),
        default_sampling=model.generation.over(folder.recommended).given(),
    )


def choose_device(name: str, rank: int) -> torch.device:
    """Of `engine.device`; "auto" gives the ranks of one process a GPU each, if it has any."""
    if name == "auto":
        visible = torch.cuda.device_count()
        return torch.device("cuda", rank % visible) if visible else torch.device("cpu")
    return torch.device(name)


def warm_up(block_size: int) -> tuple[StepPlan, StepPlan]:
    """A prompt chunk and a decode that touch every weight once, so that the first request need not wait for pages.

    All their KV lands in the scratch block of preflight: what it is does not matter.
    """
    draw = Draw(SamplingParams(temperature=0.0), seed=0, position=WARM_UP_TOKENS)
    blocks = (SCRATCH_BLOCK,) * -(-(WARM_UP_TOKENS + 1) // block_size)
    prompt = Chunk("warm-up/0", (1,) * WARM_UP_TOKENS, 0, blocks[: -(-WARM_UP_TOKENS // block_size)], draw)
    decode = Chunk("warm-up/0", (1,), WARM_UP_TOKENS, blocks, structs.replace(draw, position=WARM_UP_TOKENS + 1))
    return StepPlan(0, (prompt,)), StepPlan(0, (decode,))
