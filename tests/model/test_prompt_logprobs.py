"""The prompt's own log probabilities, through the executor, equal those that transformers computes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.test_executor import BLOCKS, PROMPT, open_tiny
from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor import rank
from workers.model.folder import ModelFolder
from workers.request import SamplingParams, TokenLogprobs

NUM_TOP = 3
GREEDY = SamplingParams(temperature=0, logprobs=0)


@pytest.fixture(scope="module")
def expected(tiny: ModelFolder) -> torch.Tensor:
    """Log probabilities [positions, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def scored_chunk(start: int, stop: int, key: str = "a/0", blocks: tuple[int, ...] = BLOCKS) -> Chunk:
    """The prompt's tokens from start to stop, with the tokens that really follow them as targets."""
    draw = Draw(GREEDY, 0, stop) if stop == len(PROMPT) else None
    table = blocks[: -(-stop // 8)]
    return Chunk(key, PROMPT[start:stop], start, table, draw, targets=PROMPT[start + 1 : stop + 1], num_top=NUM_TOP)


def assert_scored(found: tuple[TokenLogprobs, ...], expected: torch.Tensor) -> None:
    assert len(found) == len(PROMPT) - 1
    for position, each in enumerate(found):
        best = expected[position].topk(NUM_TOP)
        assert each.chosen == pytest.approx(float(expected[position, PROMPT[position + 1]]), abs=1e-4)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("slice_rows", [1, 3, 1000])
async def test_prompt_logprobs_equal_transformers_in_one_chunk_and_in_slices(
    tiny: ModelFolder, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, slice_rows: int
) -> None:
    monkeypatch.setattr(rank, "SLICE_BYTES", slice_rows * 4 * 320)
    executor = await open_tiny(tiny)
    result = await executor.execute(StepPlan(1, (scored_chunk(0, len(PROMPT)),)))
    await executor.close()
    assert_scored(result.prompt_logprobs[0], expected)
    assert result.tokens[0] == int(expected[-1].argmax())


async def test_prompt_logprobs_over_several_steps_with_other_chunks(tiny: ModelFolder, expected: torch.Tensor) -> None:
    executor = await open_tiny(tiny)
    other = Chunk("b/0", PROMPT, 0, (7, 8, 10), Draw(GREEDY, 0, len(PROMPT)))
    first = await executor.execute(StepPlan(1, (other, scored_chunk(0, 8))))
    second = await executor.execute(StepPlan(2, (scored_chunk(8, 9),)))
    third = await executor.execute(StepPlan(3, (scored_chunk(9, len(PROMPT)), other)))
    await executor.close()
    assert [len(each) for each in first.prompt_logprobs] == [0, 8]
    assert_scored(first.prompt_logprobs[1] + second.prompt_logprobs[0] + third.prompt_logprobs[0], expected)
    assert third.tokens[0] == third.tokens[1] == int(expected[-1].argmax())


async def test_without_prompt_logprobs_nothing_is_scored(tiny: ModelFolder) -> None:
    executor = await open_tiny(tiny)
    result = await executor.execute(StepPlan(1, (Chunk("b/0", PROMPT, 0, BLOCKS, Draw(GREEDY, 0, 21)),)))
    await executor.close()
    assert result.prompt_logprobs == ()
