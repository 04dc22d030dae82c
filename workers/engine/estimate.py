"""The engine's estimate of step times: a cost model, corrected by the steps that ran.

Pure: seconds are arguments; it reads no clock.
"""

import math
from collections.abc import Sequence

from workers.costs import CorrectedCost, CostModel
from workers.engine.step import StepPlan

_USUAL_PROMPT = 512  # tokens
_FADE = 0.9  # decay of the sums below with each step that has prompts
_BOUND = 100.0  # largest correction of one step
_MOST_APART = 30.0  # one of the two ratios over the other
# Variances of the logarithms of the two ratios, in units of the noise of one step (20 %, squared).
_COMMON, _APART = 1e6, 25.0  # at the beginning: of both together, unknown; of one beside the other, a factor of e
_DRIFT = 0.01  # with each step, so that the newest one counts a tenth: single steps are noisy, ten of them are not


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
    """Owned by an Engine. `block_bytes`: KV bytes of a block.

    An extended Kalman filter of two logarithms: by how much decodes, with the fixed cost of a step, take longer than in
    the given model, and by how much prompts do.
    """

    def __init__(self, cost: CostModel, block_bytes: int = 0) -> None:
        self.cost = cost  # the corrected cost model
        self.ratios = 1.0, 1.0  # of decodes and of prompts to the given model, to three digits
        self._given = cost
        self._block_bytes = block_bytes
        self._decode = self._prompt = 1.0
        self._decode_variance = self._prompt_variance = _COMMON + _APART
        self._covariance = _COMMON
        self._prompts_took_s = self._prompts_alone_s = 0.0  # recent steps, decayed

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Correct the estimate: `plan` took `seconds` through all stages, without waits for other plans."""
        prompts, batch, context_tokens = step_parts(plan)
        step_s = decode_s = self._given.decode_seconds(batch, context_tokens)
        if prompts:
            step_s = self._given.mixed_seconds(prompts, batch, context_tokens)
            alone_s = sum(self._alone_seconds(*prompt) for prompt in prompts)
            self._prompts_took_s = _FADE * self._prompts_took_s + seconds
            self._prompts_alone_s = _FADE * self._prompts_alone_s + alone_s
        seconds -= self._given.swap_seconds((len(plan.swap_out) + len(plan.swap_in)) * self._block_bytes) / 2
        self._correct(decode_s, step_s, seconds)

    def learn_decodes(self, batch: int, context_tokens: int, seconds: Sequence[float]) -> None:
        """As `learn`, of steps in a row of the same decodes alone, without swaps. `context_tokens`: of the first."""
        given = self._given.steps_seconds(batch, context_tokens, len(seconds))
        if given == seconds and self.cost is self._given:
            return  # nothing to correct
        for step_s, took_s in zip(given, seconds, strict=True):
            if took_s != step_s or self.cost is not self._given:
                self._correct(step_s, step_s, took_s)

    def _correct(self, decode_s: float, step_s: float, seconds: float) -> None:
        """A step took so long. In the given model its decodes and fixed cost take `decode_s`, all of it `step_s`."""
        expected_s = self._prompt * step_s + (self._decode - self._prompt) * decode_s
        if expected_s <= 0.0 or seconds <= 0.0 or seconds == expected_s:
            return
        error = math.log(min(max(seconds / expected_s, 1 / _BOUND), _BOUND))
        decode_share = self._decode * decode_s / expected_s
        prompt_share = 1.0 - decode_share
        decode = decode_share * self._decode_variance + prompt_share * self._covariance
        prompt = decode_share * self._covariance + prompt_share * self._prompt_variance
        variance = decode_share * decode + prompt_share * prompt + 1.0
        self._prompt *= math.exp(error * prompt / variance)
        decode_ratio = self._decode * math.exp(error * decode / variance)
        self._decode = min(max(decode_ratio, self._prompt / _MOST_APART), self._prompt * _MOST_APART)
        self._decode_variance += _DRIFT * decode_share - decode * decode / variance
        self._prompt_variance += _DRIFT * prompt_share - prompt * prompt / variance
        self._covariance -= decode * prompt / variance
        self.cost = CorrectedCost.of(self._given, self._decode, self._prompt)
        self.ratios = float(f"{self._decode:.3g}"), float(f"{self._prompt:.3g}")

    def prompt_seconds(self, num_tokens: int, num_cached: int) -> float:
        """Predicted seconds of a prompt in steps shared with other sequences, as recent prompts were."""
        pace = self._prompts_took_s / self._prompts_alone_s if self._prompts_alone_s else self._prompt
        return pace * self._alone_seconds(num_tokens, num_cached)

    def _alone_seconds(self, num_tokens: int, num_cached: int) -> float:
        """Predicted seconds of a prompt without a step's fixed cost."""
        given = self._given
        return max(1e-9, given.prefill_seconds(num_tokens, num_cached) - given.mixed_seconds((), 0, 0))
