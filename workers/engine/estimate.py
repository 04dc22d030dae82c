"""What the engine believes its next steps will cost: a cost model, corrected by the steps it has seen.

Pure: seconds are arguments; it reads no clock.
"""

import math

from workers.costs import CostModel
from workers.engine.step import StepPlan

_MEMORY = 0.1  # weight of the newest step; single steps are noisy, ten of them are not
_USUAL_PROMPT = 512  # tokens
_FADE = 0.9  # of what is known, for each step with prompts
_BOUND = 100.0  # a step that was this much off says nothing about speed


def _parts(plan: StepPlan) -> tuple[list[tuple[int, int]], int, int]:
    """Prompts, and the batch of decodes and its context tokens. A chunk of one token that draws is a decode."""
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
    """What the cost model says of this plan."""
    return cost.mixed_seconds(*_parts(plan))


def prompt_share(cost: CostModel, num_tokens: int, stages: int) -> int:
    """How many of `num_tokens` prompt tokens a plan should take, so that `stages` work on some at the same time.

    Stages are idle while the first part reaches the last stage, and behind the last part. In m equal parts the tokens
    are through after (stages - 1 + m) / stages plans of fixed_s + num_tokens * token_s / m seconds: least when
    m² = (stages - 1) * num_tokens * token_s / fixed_s. Never more parts than stages: from there on little is left to
    win, and a step's fixed cost is what the model knows least. `fixed_s` is an empty step, `token_s` what a token of a
    prompt of usual length adds to it.
    """
    fixed_s = cost.mixed_seconds((), 0, 0)
    usual = min(num_tokens, _USUAL_PROMPT)
    work_s = (stages - 1) * num_tokens * (cost.prefill_seconds(usual) - fixed_s) / max(usual, 1)
    parts = stages if work_s >= stages * stages * fixed_s else max(1.0, math.sqrt(work_s / fixed_s))
    return math.ceil(num_tokens / parts)


class StepEstimate:
    """Owned by an Engine. `block_bytes`: what a block's swap moves."""

    def __init__(self, cost: CostModel, block_bytes: int = 0) -> None:
        self._given = cost
        self._block_bytes = block_bytes
        self._ratio = 1.0
        self._seen = False
        self._prompts_took_s = self._prompts_alone_s = 0.0  # of late; fading

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """A plan took so long through all stages, the waits for other plans left out."""
        prompts, batch, context_tokens = _parts(plan)
        expected = self._given.mixed_seconds(prompts, batch, context_tokens)
        if prompts:
            alone_s = sum(self._alone_seconds(*prompt) for prompt in prompts)
            self._prompts_took_s = _FADE * self._prompts_took_s + seconds
            self._prompts_alone_s = _FADE * self._prompts_alone_s + alone_s
        seconds -= self._given.swap_seconds((len(plan.swap_out) + len(plan.swap_in)) * self._block_bytes) / 2
        if expected <= 0.0 or seconds <= 0.0:
            return
        ratio = min(max(seconds / expected, 1 / _BOUND), _BOUND)
        self._ratio = ratio if not self._seen else self._ratio + _MEMORY * (ratio - self._ratio)
        self._seen = True

    def prompt_seconds(self, num_tokens: int, num_cached: int) -> float:
        """What a prompt takes here, with such company as prompts had of late."""
        pace = self._prompts_took_s / self._prompts_alone_s if self._prompts_alone_s else self._ratio
        return pace * self._alone_seconds(num_tokens, num_cached)

    def _alone_seconds(self, num_tokens: int, num_cached: int) -> float:
        """Without a step's fixed part."""
        given = self._given
        return max(1e-9, given.prefill_seconds(num_tokens, num_cached) - given.mixed_seconds((), 0, 0))

    @property
    def cost(self) -> CostModel:
        """The model as corrected so far."""
        return self._given.scaled(self._ratio) if self._seen else self._given
