"""Step shapes for the fit of the cost model, measured as handmade plans on a real executor.

Every sequence of a plan has its own blocks, as in serving.
"""

from collections.abc import Callable
from statistics import median

from diptych.shapes import Shape
from kvtransfer.open import RESERVED_BLOCKS
from workers.engine.executor import Executor
from workers.engine.step import StepPlan
from workers.engine.step_timing import num_blocks, step_plan
from workers.profiles.fit import Point

ROUNDS = 3

SEEN = (
    *(Shape(((tokens, 0),)) for tokens in (16, 64, 128, 256, 512, 1024)),
    *(Shape(((tokens, cached),)) for cached in (512, 1536) for tokens in (16, 64, 256, 512)),
    *(Shape(((tokens, 0),) * prompts) for tokens, prompts in ((64, 4), (128, 8))),
    *(Shape((), batch, context) for context in (64, 480) for batch in (1, 2, 4, 8, 16, 32)),
    *(Shape((), batch, 1500) for batch in (1, 4, 10)),
    *(Shape(((tokens, 512),), batch, 300) for batch in (4, 16, 31) for tokens in (32, 128, 480)),
)
HELD_OUT = (
    *(Shape(((tokens, 0),)) for tokens in (32, 96, 384, 768)),
    *(Shape(((tokens, 1024),)) for tokens in (48, 192, 640)),
    Shape(((100, 0),) * 3),
    *(Shape((), batch, context) for context in (200, 700) for batch in (1, 3, 6, 12, 20)),
    *(Shape(((tokens, 256),), batch, 400) for batch in (2, 8, 24) for tokens in (40, 100, 400)),
)


async def measure(executor: Executor, progress: Callable[[str], None]) -> tuple[Point, ...]:
    """The median over rounds; each round measures every shape once."""
    facts = executor.facts
    plans = {shape: plan(shape, facts.layout.block_size, facts.vocab_size) for shape in (*SEEN, *HELD_OUT)}
    seconds: dict[Shape, list[float]] = {shape: [] for shape in plans}
    for number in range(ROUNDS):
        for shape, each in plans.items():
            seconds[shape].append((await executor.execute(each)).seconds)
        progress(f"steps: round {number + 1} of {ROUNDS}")
    return tuple(Point(shape, round(median(seconds[shape]), 6), shape in HELD_OUT) for shape in plans)


def plan(shape: Shape, block_size: int, vocab_size: int) -> StepPlan:
    """A plan of this shape on the first blocks of a pool."""
    blocks = range(RESERVED_BLOCKS, RESERVED_BLOCKS + num_blocks(shape, block_size))
    return step_plan(shape, blocks, block_size, vocab_size)
