"""The executor with one rank: a real model in this process.

Composes folder, model, pool and transports, and adapts the rank to the `Executor` port. Knows no schedule.
"""

import asyncio
import logging
from dataclasses import replace

import torch

from kvtransfer.layout import KVLayout
from kvtransfer.open import SharedMemory, open_transports
from kvtransfer.probe import SCRATCH_BLOCK
from kvtransfer.ticket import LinkReport, PeerAddress, ShardAddress
from kvtransfer.transport import PullOrder, Read
from workers.config import EngineConfig, WorkerConfig
from workers.engine.executor import ModelFacts
from workers.engine.step import Chunk, Draw, StepPlan, StepResult
from workers.errors import ModelError
from workers.executor.kv_pool import KVPool, allocate_pool
from workers.executor.rank import Rank
from workers.executor.threads import ComputeThread, multiplies_bfloat16
from workers.model.config import DTYPES, ModelConfig, read_model_config
from workers.model.decoder import Decoder
from workers.model.folder import ModelFolder, content_id, count_parameters, tokenizer_id
from workers.model.load import load_decoder
from workers.ops.attention import best_attention
from workers.request import SamplingParams

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 80  # enough rows for the linears of large batches


class SoloExecutor:
    """`Executor` over one `Rank`. Close it, or its memory and sockets stay."""

    depth = 1
    bubble_share = 0.0

    def __init__(self, facts: ModelFacts, rank: Rank) -> None:
        self.facts = facts
        self._rank = rank

    async def execute(self, plan: StepPlan) -> StepResult:
        step = await self._rank.execute(plan)
        return StepResult(plan.number, step.tokens, step.logprobs, (step.digests,), step.seconds, step.prompt_logprobs)

    def shards(self) -> tuple[ShardAddress, ...]:
        return (self._rank.shard(),)

    async def connect(self, peer: PeerAddress) -> LinkReport:
        return await self._rank.connect(peer)

    def pull(self, order: PullOrder) -> Read:
        return self._rank.pull(order)

    async def forget(self, incarnation: str) -> None:
        await self._rank.forget(incarnation)

    async def failure(self) -> Exception:
        """Never: what fails here fails in `execute`."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._rank.close()


async def open_solo(
    config: WorkerConfig, folder: ModelFolder, incarnation: str, shared: SharedMemory | None = None
) -> SoloExecutor:
    """Load the model, allocate its KV and open its transports, off the event loop.

    `shared` joins workers of one process for the "memory" backend. Raises `ModelError` (model or memory),
    `TransportUnavailable` (no backend works).
    """
    if config.parallel.world_size != 1:
        raise ValueError(f"{config.name}: one rank cannot hold {config.parallel.world_size}; use the gang executor")
    device = _device(config.engine.device)
    # The event loop's own few torch calls need no team of threads, which would spin beside the one that computes.
    torch.set_num_threads(1)
    thread = ComputeThread(config.name, config.engine.threads or config.cpus, config.engine.cores)
    try:
        facts, model, pool = await thread.run(lambda: _load(config, folder, device))
        transports = open_transports(
            pool.region,
            config.transfer.backends,
            incarnation=incarnation,
            secret=config.secret.encode(),
            host=config.transfer.host,
            quarantine_s=config.transfer.quarantine_s,
            shared=shared,
        )
    except BaseException:
        await thread.close()
        raise
    executor = SoloExecutor(facts, Rank(model, pool, transports, thread))
    for plan in warm_up(config.engine.block_size):
        await executor.execute(plan)
    return executor


def warm_up(block_size: int) -> tuple[StepPlan, StepPlan]:
    """A prompt chunk and a decode that touch every weight once, so that the first request need not wait for pages.

    All their KV lands in the scratch block of preflight: what it is does not matter.
    """
    draw = Draw(SamplingParams(temperature=0.0), seed=0, position=WARM_UP_TOKENS)
    blocks = (SCRATCH_BLOCK,) * -(-(WARM_UP_TOKENS + 1) // block_size)
    prompt = Chunk("warm-up/0", (1,) * WARM_UP_TOKENS, 0, blocks[: -(-WARM_UP_TOKENS // block_size)], draw)
    decode = Chunk("warm-up/0", (1,), WARM_UP_TOKENS, blocks, replace(draw, position=WARM_UP_TOKENS + 1))
    return StepPlan(0, (prompt,)), StepPlan(0, (decode,))


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
    )


def _load(config: WorkerConfig, folder: ModelFolder, device: torch.device) -> tuple[ModelFacts, Decoder, KVPool]:
    """`engine.dtype` is the KV's; weights follow it on a GPU and are `engine.weights` on a CPU."""
    if config.engine.dtype not in DTYPES:
        raise ModelError(f"engine.dtype {config.engine.dtype!r} is not one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, config.engine.dtype)
    if config.engine.weights == "bfloat16" and not multiplies_bfloat16():
        logger.warning(
            "%s: engine.weights is bfloat16, but this CPU has no instructions for it (AVX512_BF16 or AMX); weights are "
            "widened to float32 as they are read, which is no faster once many tokens share a step",
            config.name,
        )
    shape = read_model_config(folder.path)
    model = load_decoder(
        folder,
        device,
        dtype,
        attention=best_attention(device, dtype, config.engine.deterministic),
        weight_format=config.engine.weights,
        deterministic=config.engine.deterministic,
    )
    facts = model_facts(folder, shape, config.engine, model.dtype.itemsize)
    return facts, model, allocate_pool(facts.layout, config.engine.kv_blocks, device, config.engine.swap_blocks)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"engine.device {name!r} is not a device: {str(error).splitlines()[0]}") from error
