"""`deterministic`: the bits of a sequence's logits do not depend on the batch or on how its prompt was cut."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.paging import pool_for, run_chunks, scattered_tables
from tests.model.tiny import write_tiny_llama
from workers.model.decoder import Decoder
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.ops.attention import best_attention
from workers.ops.native.library import library

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(library() is None, reason="needs the native kernels: install g++")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Odd sizes, so that no row of anything fills a vector register."""
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("odd") / "m", hidden_size=72, ffn_size=100, num_heads=6, num_kv_heads=2, head_dim=20
    )
    attention = best_attention(CPU, torch.float32, deterministic=True)
    return load_decoder(ModelFolder("m", folder), CPU, torch.float32, attention, deterministic=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), threads=st.sampled_from([1, 2]), dtype=st.sampled_from(["float32", "bfloat16", "int8", "fp8"]))
def test_logits_have_the_same_bits_in_any_batch_and_any_chunks(
    model: Decoder, data: st.DataObject, threads: int, dtype: str
) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**16)))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]
    alone = [
        run_chunks(
            model,
            pool_for(model.config, 30, dtype=dtype),
            [prompt],
            [[*range(-(-len(prompt) // 4))]],
            [[(0, len(prompt))]],
        )
        for prompt in prompts
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tables = scattered_tables(lengths, num_blocks=100, block_size=4, rng=rng)
        found = run_chunks(model, pool_for(model.config, 100, dtype=dtype), prompts, tables, _cut(lengths, data))
    finally:
        torch.set_num_threads(before)
    for (expected,), logits in zip(alone, found, strict=True):
        assert torch.equal(logits, expected)


def _cut(lengths: list[int], data: st.DataObject) -> list[list[tuple[int, int]]]:
    """Steps of (prompt, tokens), one-token runs first in each."""
    left, steps = dict(enumerate(lengths)), []
    while left:
        chosen = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = [(prompt, data.draw(st.integers(1, left[prompt]))) for prompt in chosen]
        steps.append(sorted(step, key=lambda each: each[1] > 1))
        for prompt, count in step:
            left[prompt] -= count
            if not left[prompt]:
                del left[prompt]
    return steps


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8"])
def test_the_real_model_too(smollm2: ModelFolder, dtype: str) -> None:
    attention = best_attention(CPU, torch.float32, deterministic=True)
    model = load_decoder(smollm2, CPU, torch.float32, attention, deterministic=True)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 49000) for _ in range(length)] for length in (300, 40, 1)]
    tables = scattered_tables([301, 40, 1], num_blocks=100, block_size=16, rng=rng)
    whole = run_chunks(model, pool_for(model.config, 100, 16, dtype), prompts[:1], tables[:1], [[(0, 300)]])[0]
    cut = run_chunks(
        model,
        pool_for(model.config, 100, 16, dtype),
        prompts,
        tables,
        [[(2, 1), (0, 256), (1, 13)], [(0, 1), (1, 27)], [(0, 43)]],
    )[0]
    assert torch.equal(cut, whole)
