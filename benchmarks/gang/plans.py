"""Typical plans of an engine."""

from workers.engine.step import Chunk, Draw, StepPlan
from workers.request import SamplingParams

CONTEXT = 250  # tokens of each decode: 16 blocks of 16
TABLE_BLOCKS = 16
PROMPT_TOKENS = 512
VOCABULARY = 49_152
SEED = 2**60 + 7  # as long as a real one when encoded


def decode_plan(batch: int) -> StepPlan:
    """One token for each of `batch` sequences in the middle of their answers."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    return StepPlan(
        1,
        tuple(
            Chunk(
                f"request-{index:08d}/0",
                (1000 + index,),
                CONTEXT,
                tuple(range(TABLE_BLOCKS * index, TABLE_BLOCKS * (index + 1))),
                Draw(params, SEED + index, CONTEXT + 1),
            )
            for index in range(batch)
        ),
    )


def prompt_plan(num_tokens: int = PROMPT_TOKENS, block_size: int = 16) -> StepPlan:
    """The first chunk of a longer prompt."""
    tokens = tuple(7919 * (index + 1) % VOCABULARY for index in range(num_tokens))
    blocks = tuple(range(-(-num_tokens // block_size)))
    return StepPlan(1, (Chunk("request-00000000/0", tokens, 0, blocks, None),))


PROMPT = f"prompt of {PROMPT_TOKENS}"
PLANS = {
    "decode of 1": decode_plan(1),
    "decode of 16": decode_plan(16),
    "decode of 32": decode_plan(32),
    PROMPT: prompt_plan(),
}
