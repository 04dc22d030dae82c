"""Times steps of a given shape on an idle worker's executor, without any request.

Blocks come from the engine's pool and go back to it. Timing stops as soon as a request arrives. Knows shapes and plans;
knows no cost model.
"""

import asyncio
from collections.abc import Callable, Sequence

from diptych.clock import now_s
from diptych.shapes import Shape, Timings
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.engine_loop import STEP_TIMEOUT_S
from workers.engine.executor import Executor
from workers.engine.step import Chunk, Draw, StepPlan
from workers.errors import Overloaded
from workers.request import SamplingParams, check_shape, refuse_outside

CALL_S = 5.0  # no step begins later than this after the call
TOUCH_BLOCKS = 32  # copied at once: the pool gathers copies in extra memory
STRIDE = 7919  # token ids that differ, so that not all tokens go to the same experts


def step_plan(
    shape: Shape, blocks: Sequence[int], block_size: int, vocab_size: int, host: Sequence[int] = ()
) -> StepPlan:
    """A step of this shape that samples greedily after every chunk; every sequence has its own blocks, as in service.

    Needs `num_blocks` blocks. Two more for each of the `host` blocks are copied: one out to it, and one in from it.
    """
    chunks = []
    free = iter(blocks)
    for number, (tokens, first) in enumerate(shape.runs):
        stop = first + tokens
        taken = tuple(next(free) for _ in range(-(-stop // block_size)))
        draw = Draw(SamplingParams(temperature=0.0), seed=0, position=stop)
        ids = tuple((position * STRIDE + number) % vocab_size for position in range(first, stop))
        chunks.append(Chunk(f"measured-{number}/0", ids, first, taken, draw))
    swap_out = tuple((next(free), each) for each in host)
    return StepPlan(0, tuple(chunks), swap_out=swap_out, swap_in=tuple((each, next(free)) for each in host))


def num_blocks(shape: Shape, block_size: int, swaps: int = 0) -> int:
    """Blocks that the shape's plan needs."""
    return sum(-(-(tokens + first) // block_size) for tokens, first in shape.runs) + 2 * swaps


async def measure(
    engine: Engine,
    executor: Executor,
    config: EngineConfig,
    shape: Shape,
    repeats: int,
    interrupted: Callable[[], bool],
) -> Timings:
    """Time up to `repeats` steps of this shape, for `CALL_S` or one step, and until `interrupted`.

    Raises `InvalidRequest` for a shape that no step of this engine can have, `Overloaded` when the engine has work,
    `TimeoutError` when the device hangs.
    """
    begun_s = now_s()
    check_shape(config, shape, repeats)
    swaps = -(-shape.swap_bytes // executor.facts.layout.block_bytes)
    wanted = num_blocks(shape, config.block_size, swaps)
    for tokens, first in shape.runs:
        refuse_outside("the tokens before a chunk, or behind a decode", first, 0, engine.max_length - tokens)
    refuse_outside("the number of swapped blocks", swaps, 0, engine.pool.host.num_blocks)
    refuse_outside("the number of blocks", wanted, 1, engine.pool.num_blocks)
    seconds: list[float] = []
    blocks, host = _take_blocks(engine, wanted), engine.pool.host.hold_free(swaps)
    try:
        if len(host) < swaps:
            raise Overloaded(f"{swaps} blocks of host memory wanted, {len(host)} are not in use", retry_after_s=1.0)
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await _touch(executor, blocks)
        plan = step_plan(shape, blocks, config.block_size, executor.facts.vocab_size, host)
        while len(seconds) < repeats and not interrupted():
            async with asyncio.timeout(STEP_TIMEOUT_S):
                seconds.append((await executor.execute(plan)).seconds)
            if now_s() - begun_s > CALL_S:
                break
    finally:
        engine.pool.end_transfer(blocks)
        for block in host:
            engine.pool.host.release(block)
    return Timings(tuple(seconds), now_s() - begun_s)


def _take_blocks(engine: Engine, count: int) -> tuple[int, ...]:
    """Blocks reserved until `BlockPool.end_transfer`. Raises `Overloaded` unless the engine is idle."""
    if engine.has_work or engine.pool.num_quarantined:
        raise Overloaded("this worker has work; measure it when it is idle", retry_after_s=1.0)
    blocks = tuple(engine.pool.allocate(count))
    engine.pool.begin_transfer(blocks)
    engine.pool.free(blocks)
    return blocks


async def _touch(executor: Executor, blocks: Sequence[int]) -> None:
    """Write all blocks: unwritten memory is one page of zeros, read faster than any KV."""
    for start in range(1, len(blocks), TOUCH_BLOCKS):
        targets = blocks[start : start + TOUCH_BLOCKS]
        await executor.execute(StepPlan(0, (), copies=tuple((blocks[0], target) for target in targets)))
