"""The engine's estimate of step times: a cost model, corrected by the steps that ran.

Pure: seconds are arguments; it reads no clock.
"""

import math
from collections.abc import Sequence

from workers.costs import CostModel
from workers.engine.step import StepPlan

_MEMORY = 0.1  # weight of the newest step; single steps are noisy, ten of them are not
_USUAL_PROMPT = 512  # tokens
_FADE = 0.9  # decay of the sums below with each step that has prompts
_BOUND = 100.0  # largest correction of one step


def step_parts(plan: StepPlan) -> tuple[list[tuple[int, int]], int, int]:
    """Prompts (tokens, computed before), number of decodes, and their context tokens.

    A chunk of one token that is sampled from is a decode.
    """
    batch = context_tokens = 0
    prompts = []
    for chunk in plan.chunks:
        num_tokens = len(chunk.tokens)
        if num_tokens == 1 and chunk.draw is not None:
            batch += 1
            context_tokens += chunk.first_position + 1
        else:
            prompts.append((num_tokens, chunk.first_position))
    return prompts, batch, context_tokens


def plan_seconds(cost: CostModel, plan: StepPlan) -> float:
    """Predicted seconds of this plan."""
    return cost.mixed_seconds(*step_parts(plan))


def prompt_share(cost: CostModel, num_tokens: int, stages: int) -> int:
    """How many of `num_tokens` prompt tokens a plan should take, so that all `stages` work at the same time.

    Stages idle while the first part moves to the last stage, and after the last part. With m equal parts, the tokens
    take (stages - 1 + m) / stages plans of fixed_s + num_tokens * token_s / m seconds, which is minimal at
    m² = (stages - 1) * num_tokens * token_s / fixed_s, to the nearest whole m. There are at most as many parts as
    stages: more gain little, and the fixed cost of a step is the least certain number. `fixed_s`: seconds of an empty
    step; `token_s`: seconds that one token of a prompt of usual length adds.
    """
    fixed_s = cost.mixed_seconds((), 0, 0)
    usual = min(num_tokens, _USUAL_PROMPT)
    work_s = (stages - 1) * num_tokens * (cost.prefill_seconds(usual) - fixed_s) / max(usual, 1)
    parts = stages if work_s >= stages * stages * fixed_s else max(1, round(math.sqrt(work_s / fixed_s)))
    return math.ceil(num_tokens / parts)


class StepEstimate:
    """Owned by an Engine. `block_bytes`: KV bytes of a block."""

    def __init__(self, cost: CostModel, block_bytes: int = 0) -> None:
        self._given = cost
        self._block_bytes = block_bytes
        self._ratio = 1.0
        self._seen = False
        self._prompts_took_s = self._prompts_alone_s = 0.0  # recent steps, decayed

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Correct the estimate: `plan` took `seconds` through all stages, without waits for other plans."""
        prompts, batch, context_tokens = step_parts(plan)
        expected = self._given.mixed_seconds(prompts, batch, context_tokens)
        if prompts:
            alone_s = sum(self._alone_seconds(*prompt) for prompt in prompts)
            self._prompts_took_s = _FADE * self._prompts_took_s + seconds
            self._prompts_alone_s = _FADE * self._prompts_alone_s + alone_s
        seconds -= self._given.swap_seconds((len(plan.swap_out) + len(plan.swap_in)) * self._block_bytes) / 2
        self._correct((expected,), (seconds,))

    def learn_decodes(self, batch: int, context_tokens: int, seconds: Sequence[float]) -> None:
        """As `learn`, of steps in a row of the same decodes alone, without swaps. `context_tokens`: of the first."""
        self._correct(self._given.steps_seconds(batch, context_tokens, len(seconds)), seconds)

    def _correct(self, expected: Sequence[float], seconds: Sequence[float]) -> None:
        ratio = self._ratio
        for one, took_s in zip(expected, seconds, strict=True):
            if one > 0.0 and took_s > 0.0:
                newest = took_s / one
                if not 1 / _BOUND <= newest <= _BOUND:
                    newest = min(max(newest, 1 / _BOUND), _BOUND)
                ratio = ratio + _MEMORY * (newest - ratio) if self._seen else newest
                self._seen = True
        self._ratio = ratio

    def prompt_seconds(self, num_tokens: int, num_cached: int) -> float:
        """Predicted seconds of a prompt in steps shared with other sequences, as recent prompts were."""
        pace = self._prompts_took_s / self._prompts_alone_s if self._prompts_alone_s else self._ratio
        return pace * self._alone_seconds(num_tokens, num_cached)

    def _alone_seconds(self, num_tokens: int, num_cached: int) -> float:
        """Predicted seconds of a prompt without a step's fixed cost."""
        given = self._given
        return max(1e-9, given.prefill_seconds(num_tokens, num_cached) - given.mixed_seconds((), 0, 0))

    @property
    def cost(self) -> CostModel:
        """The corrected cost model."""
        return self._given.scaled(self._ratio) if self._seen else self._given
