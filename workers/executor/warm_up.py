"""The steps that an executor computes before its worker is ready, so that no request waits for what happens only once:
page faults of weights, kernels that Triton compiles, CUDA graphs that are captured.

They go past the engine and write into preflight's scratch block, so no sequence and no cached prefix knows of them.
Knows plans; knows no device. Source of the idea: vLLM's dummy batches, `kernel_warmup` and capture of graphs.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvtransfer.probe import SCRATCH_BLOCK
from workers.config import EngineConfig
from workers.engine.step import Chunk, Draw, StepPlan
from workers.request import SamplingParams

logger = logging.getLogger(__name__)

WARM_UP_S = 120.0  # later steps are left out: what they prepare is prepared when a request needs it
PROGRESS_S = 10.0
TOKENS = 80  # of a short prompt: enough rows to use the linears' kernels for large batches
GREEDY = Draw(SamplingParams(temperature=0.0), seed=0, position=0)
SAMPLED = SamplingParams(
    seed=0, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias=((1, 0.5),), logprobs=3
)
LONG_CONTEXT = 4096  # of a decode whose keys are split even in a large batch


async def warm_up(
    name: str, execute: Callable[[StepPlan], Awaitable[object]], plans: Sequence[StepPlan], limit_s: float = WARM_UP_S
) -> None:
    """Execute the plans in order, for `limit_s` seconds and the step in flight then."""
    begun_s = told_s = time.monotonic()
    for number, plan in enumerate(plans):
        now_s = time.monotonic()
        if now_s - begun_s >= limit_s:
            logger.warning("%s: warm-up ends after %d of %d steps and %.0f s", name, number, len(plans), limit_s)
            return
        if now_s - told_s >= PROGRESS_S:
            told_s = now_s
            logger.info("%s: warm-up, %d of %d steps in %.0f s", name, number, len(plans), now_s - begun_s)
        await execute(plan)
    logger.info("%s: %d steps of warm-up took %.2f s", name, len(plans), time.monotonic() - begun_s)


def short_steps(engine: EngineConfig) -> tuple[StepPlan, ...]:
    """A short prompt and a decode, which touch every weight."""
    return _step(engine, _chunk(engine, "prompt", 0, TOKENS)), _step(engine, _chunk(engine, "decode", TOKENS, 1))


def compiling_steps(
    engine: EngineConfig, context_length: int, graphs: Sequence[tuple[int, int]]
) -> tuple[StepPlan, ...]:
    """Steps with every kernel that a step of this engine may launch, and decodes that fill each bucket of `graphs`.

    graphs: numbers of sequences and longest contexts, the most useful first; none if decodes have no graphs.
    """
    return (*short_steps(engine), *_kernels(engine, context_length), *_decodes(engine, context_length, graphs))


def fullest_step(engine: EngineConfig, context_length: int) -> StepPlan:
    """`max_running` sequences that share `max_batch_tokens` tokens, each of them sampling. For measurements."""
    length = min(max(1, engine.max_batch_tokens // engine.max_running), context_length)
    return _step(engine, *(_chunk(engine, f"fullest-{number}", 0, length) for number in range(engine.max_running)))


def deepest_step(engine: EngineConfig, longest: int) -> StepPlan:
    """A decode of as many sequences as the engine takes, one of them with `longest` tokens. For measurements."""
    return next(_decodes(engine, longest, [(engine.max_running, longest)]))


def _kernels(engine: EngineConfig, context_length: int) -> Iterator[StepPlan]:
    tokens = min(TOKENS, context_length // 2)
    yield _step(engine, _chunk(engine, "longest", 0, min(engine.max_batch_tokens, context_length)))
    # Decodes beside a chunk behind a cached prefix, whose tokens are scored, with each kind of sampling.
    seen, counts = (2).to_bytes(4, "little"), (1).to_bytes(4, "little")
    sampled = Draw(SAMPLED, seed=0, position=tokens + 1, seen=seen, counts=counts, banned=(0,))
    plain = Draw(SamplingParams(seed=0), seed=0, position=tokens + 1)
    yield _step(
        engine,
        _chunk(engine, "sampled", tokens, 1, sampled),
        _chunk(engine, "cached", tokens, tokens, targets=(1,) * (tokens - 1), num_top=3),
        digests=True,
    )
    yield _step(engine, _chunk(engine, "plain", tokens, 1, plain), _chunk(engine, "middle", 0, tokens, None))


def _decodes(engine: EngineConfig, context_length: int, graphs: Sequence[tuple[int, int]]) -> Iterator[StepPlan]:
    """Only the first sequence has the bucket's context. Without graphs: as many sequences as the engine takes."""
    for sequences, context in graphs or [(engine.max_running, TOKENS), (engine.max_running, LONG_CONTEXT)]:
        others = min(TOKENS, context_length - 1)
        contexts = [min(context, context_length), *[others] * (min(sequences, engine.max_running) - 1)]
        yield _step(engine, *(_chunk(engine, f"decode-{at}", each - 1, 1) for at, each in enumerate(contexts)))


def _step(engine: EngineConfig, *chunks: Chunk, digests: bool = False) -> StepPlan:
    whole_and_part = ((SCRATCH_BLOCK, engine.block_size), (SCRATCH_BLOCK, 1))
    return StepPlan(0, chunks, digest_blocks=whole_and_part if digests else ())


def _chunk(
    engine: EngineConfig,
    name: str,
    first: int,
    num_tokens: int,
    draw: Draw | None = GREEDY,
    targets: tuple[int, ...] = (),
    num_top: int = 0,
) -> Chunk:
    blocks = (SCRATCH_BLOCK,) * -(-(first + num_tokens) // engine.block_size)
    return Chunk(f"warm-up-{name}/0", (1,) * num_tokens, first, blocks, draw, targets, num_top)
