"""Decode graphs on a CPU, with a capture that repeats its work: buckets, filling, and the same tokens as without."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.plans import greedy
from kvtransfer.open import RESERVED_BLOCKS
from tests.model.paging import pool_for
from tests.model.tiny import write_tiny_llama
from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor.cuda_graphs import (
    MIN_CONTEXT,
    DecodeGraphs,
    context_bucket,
    padded,
    sequences_bucket,
)
from workers.executor.inputs import step_arrays
from workers.executor.rank import ModelPart
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.request import SamplingParams

GREEDY = Draw(SamplingParams(temperature=0.0), seed=0, position=1)


class Repeated:
    """Counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def test_decodes_by_graphs_give_the_same_tokens(tmp_path: Path) -> None:
    folder = ModelFolder("tiny", write_tiny_llama(tmp_path / "m", context_length=2048))
    model = load_decoder(folder, torch.device("cpu"), torch.float32, deterministic=True)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (9, 33, 20)]
    plain = greedy(ModelPart(model), pool_for(model.config, 80), prompts, 12, chunk=16, first_block=RESERVED_BLOCKS)
    pool, capture = pool_for(model.config, 80), Repeated()
    graphs = DecodeGraphs(model, pool.blocks, 32, capture)
    assert greedy(ModelPart(model, graphs=graphs), pool, prompts, 12, chunk=16, first_block=RESERVED_BLOCKS) == plain
    # A bucket of one for the prompt's last chunk, which has one token, and one of four for all decodes.
    assert capture.captures == 2 and capture.replays == 12
    sizes = (1, 2, 4, 8, 16, 24, 32)
    assert graphs.buckets == [(size, 1024) for size in sizes]  # the pool has 320 tokens
    larger = DecodeGraphs(model, pool_for(model.config, 600).blocks, 32, capture)
    assert larger.buckets == [(size, context) for context in (1024, 2048) for size in sizes]


@given(st.integers(1, 256), st.integers(1, 200_000))
def test_buckets_hold_what_they_are_for_with_little_waste(sequences: int, context: int) -> None:
    bucket = sequences_bucket(sequences)
    assert sequences <= bucket < sequences + 8 and (bucket <= 2 * sequences)
    assert context <= context_bucket(context) < max(MIN_CONTEXT + 1, 2 * context)


def test_sequences_that_fill_a_bucket_use_a_block_of_their_own() -> None:
    chunks = tuple(Chunk(str(row), (7,), 20, (5 + row, 9 + row), GREEDY) for row in range(3))
    step = padded(step_arrays(StepPlan(1, chunks), 16), 4, 1024, 99, 16)
    assert step.slots.tolist() == [9 * 16 + 4, 10 * 16 + 4, 11 * 16 + 4, 99 * 16]
    assert step.contexts.tolist() == [21, 21, 21, 1] and step.tables.shape == (4, 64)
    assert step.tables[3].tolist() == [99] * 64 and step.tables[1, :2].tolist() == [6, 10]


@pytest.mark.parametrize("chunks", [
    (Chunk("prompt", (7, 8), 0, (5,), GREEDY),),
    (Chunk("decode", (7,), 20, (5, 6), GREEDY), Chunk("prompt", (7, 8), 0, (7,), None)),
    (Chunk("middle", (7,), 0, (5,), None),),
    tuple(Chunk(str(row), (7,), 0, (5 + row,), GREEDY) for row in range(257)),
])  # fmt: skip
def test_other_steps_have_no_graph(chunks: tuple[Chunk, ...], tmp_path: Path) -> None:
    model = load_decoder(ModelFolder("tiny", write_tiny_llama(tmp_path / "m")), torch.device("cpu"), torch.float32)
    graphs = DecodeGraphs(model, pool_for(model.config, 4).blocks, 256, Repeated())
    assert graphs.logits(step_arrays(StepPlan(1, chunks), 16)) is None
