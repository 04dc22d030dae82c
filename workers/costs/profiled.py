"""Step times from published measurements and from data sheets.

Sources: Williams et al., Roofline (CACM 2009); Zhong et al., DistServe (OSDI'24), appendix A, with the formulas of the
released simulator (`simdistserve/estimators/time_estimator.py` and `base/worker.py`); Patel et al., Splitwise
(ISCA'24); Agrawal et al., Vidur (MLSys'24).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from workers.costs.port import CostModel, check_non_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCost(CostModel):
    """Common fields: transfers, swaps, and `ratio`, which multiplies every step. Transfers are free by default."""

    transfer_latency_s: float = 0.0
    transfer_byte_s: float = 0.0
    swap_byte_s: float = 0.0
    ratio: float = 1.0

    def __post_init__(self) -> None:
        check_non_negative(self)

    def scaled(self, ratio: float) -> Self:
        return replace(self, ratio=self.ratio * ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost(ProfiledCost):
    """The longer of arithmetic and memory traffic, of linear layers and of attention, plus launches and communication.

    Seconds through all stages, tensor parallelism included. Arithmetic: `token_s` per token computed, `pair_s` per
    token that it attends to, `row_s` per decode (the head; a prompt's one token is not counted). Traffic: `weights_s`
    per step, `experts_s` for all experts, of which a token takes `expert_share`, each as often as another,
    `context_s` per token of KV read, and `state_s` per sequence for its state of linear attention. Always: `fixed_s`
    for launches and latencies, `send_token_s` per token for all-reduces and sends between stages.
    """

    token_s: float
    pair_s: float
    row_s: float
    weights_s: float
    context_s: float
    fixed_s: float
    send_token_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 0.0
    state_s: float = 0.0

    def read_seconds(self, tokens: int, context_tokens: float, sequences: int = 0) -> float:
        """Of weights, KV and states, for a step of so many tokens."""
        experts_s = self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)
        return self.weights_s + experts_s + context_tokens * self.context_s + sequences * self.state_s

    def kernel_seconds(self, tokens: int, rows: int, pairs: float, context_tokens: float, sequences: int) -> float:
        """Of all layers and the head. Reads overlap with the arithmetic of their own kernels only, so the KV that
        attention reads does not overlap with the linear layers of other tokens."""
        linear_s = max(tokens * self.token_s + rows * self.row_s, self.read_seconds(tokens, 0))
        attention_s = max(pairs * self.pair_s, context_tokens * self.context_s + sequences * self.state_s)
        return linear_s + attention_s

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        sequences, tokens, pairs = batch, batch, float(context_tokens)
        for num_tokens, cached_tokens in chunks:
            if num_tokens:
                sequences += 1
                tokens += num_tokens
                pairs += num_tokens * (cached_tokens + (num_tokens + 1) / 2)
                context_tokens += cached_tokens
        kernels_s = self.kernel_seconds(tokens, batch, pairs, context_tokens, sequences)
        return self.ratio * (kernels_s + self.fixed_s + tokens * self.send_token_s)


Fit = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedCost(ProfiledCost):
    """DistServe's step times, in seconds through all stages: one fit for prefills, two for decodes.

    A prefill of prompts l costs a + b * sum(l) + c * sum(l²); a chunk of n after p cached tokens has n(n + 2p) instead
    of l². A decode costs a + b * context + c * batch, by `small_batch` below `border` sequences, by `large_batch` from
    there on; at the border one more decode may shorten a step. Every step adds `overhead_s`, and `overhead_token_s` per
    token of its sequences; a prefill adds `prefill_stages_s`.

    DistServe does not mix phases. Here a mixed step costs both, with only the larger of the two fixed costs, since the
    weights are read once.
    """

    prefill: Fit
    small_batch: Fit
    large_batch: Fit
    border: int
    overhead_s: float = 0.0
    overhead_token_s: float = 0.0
    prefill_stages_s: float = 0.0

    def __post_init__(self) -> None:
        super(PhasedCost, self).__post_init__()
        for value in (*self.prefill, *self.small_batch, *self.large_batch):
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"a coefficient of a step time is {value}; it must be 0 or more, and finite")

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        tokens = squares = present = 0
        for num_tokens, cached_tokens in chunks:
            tokens += num_tokens
            present += cached_tokens
            squares += num_tokens * (num_tokens + 2 * cached_tokens)
        prefill_a, prefill_b, prefill_c = self.prefill
        decode_a, decode_b, decode_c = self.small_batch if batch < self.border else self.large_batch
        seconds = decode_b * context_tokens + decode_c * batch
        if tokens:
            fixed = max(prefill_a, decode_a) if batch else prefill_a
            seconds += fixed + prefill_b * tokens + prefill_c * squares + self.prefill_stages_s
        else:
            seconds += decode_a if batch else min(prefill_a, decode_a, self.large_batch[0])
        return self.ratio * (seconds + self.overhead_s + self.overhead_token_s * (tokens + present + context_tokens))


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Piecewise linear through (xs, ys), both rising, x strictly. Raises ValueError for other points.

    Constant before the first point, extrapolated from the last two after the last. One point is a constant.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        finite = all(math.isfinite(value) and value >= 0.0 for value in (*self.xs, *self.ys))
        rising = all(a < b for a, b in zip(self.xs, self.xs[1:], strict=False))
        level = all(a <= b for a, b in zip(self.ys, self.ys[1:], strict=False))
        if not (self.xs and len(self.xs) == len(self.ys) and finite and rising and level):
            raise ValueError(f"a cost curve needs rising points of 0 or more, not {self.xs} and {self.ys}")

    @classmethod
    def rising(cls, points: Iterable[tuple[float, float]]) -> "StepCurve":
        """Through measured points. A decrease is noise, and is raised to the previous maximum."""
        sound = sorted(points)
        return cls(tuple(x for x, _ in sound), tuple(accumulate((y for _, y in sound), max)))

    def plus(self, fixed: float, slope: float) -> "StepCurve":
        """The curve plus fixed + slope * x."""
        return StepCurve(self.xs, tuple(y + fixed + slope * x for x, y in zip(self.xs, self.ys, strict=True)))

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        right = min(bisect_right(xs, x), len(xs) - 1)
        if right == 0:
            return ys[0]
        left_x, left_y = xs[right - 1], ys[right - 1]
        return left_y + (ys[right] - left_y) * (x - left_x) / (xs[right] - left_x)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost(ProfiledCost):
    """Splitwise's measured steps: piecewise linear in the prompt tokens of a step, and in the batch of a decode.

    `prompt`: one prompt by its tokens; `prompts`: several by their sum, at least as long as the longest alone;
    `decode`: by batch, at any context, which the table lacks. It also lacks cached prefixes: a chunk's token counts as
    1 + cached * `attention_share` tokens, the share of FLOPs that one more attended token adds. A mixed step takes
    `mixed_factor` times a prompt step that includes the decodes as tokens, as in the released simulator, and at least
    as long as its decodes.
    """

    prompt: StepCurve
    prompts: StepCurve
    decode: StepCurve
    attention_share: float
    mixed_factor: float = 1.1

    def __post_init__(self) -> None:
        super(TableCost, self).__post_init__()
        if self.mixed_factor < 1.0:
            raise ValueError(f"cost.mixed_factor is {self.mixed_factor}; a decode makes no prompt step shorter")

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        tokens = longest = 0.0
        count = 0
        for num_tokens, cached_tokens in chunks:
            if num_tokens:
                counted = num_tokens * (1.0 + cached_tokens * self.attention_share)
                tokens += counted
                longest = max(longest, counted)
                count += 1
        if not count:
            return self.ratio * (self.decode(batch) if batch else min(self.decode.ys[0], self.prompt.ys[0]))
        seconds = self.prompt(longest + batch)
        if count > 1:
            seconds = max(seconds, self.prompts(tokens + batch))
        if batch:
            seconds = max(self.decode(batch), seconds * self.mixed_factor)
        return self.ratio * seconds

    def steps_seconds(self, batch: int, context_tokens: int, count: int) -> list[float]:
        return [self.mixed_seconds((), batch, 0)] * count


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredCost(ProfiledCost):
    """Everything but attention as measured, by the tokens of a step; attention by arithmetic.

    `tokens`: seconds of all layers, all-reduces and sends between stages, alike for prompts and decodes. A prompt token
    adds `pair_s` per token that it attends to, a decode `context_s` per token of its context; a chunk reads its cached
    tokens once, `context_s` each.
    """

    tokens: StepCurve
    pair_s: float
    context_s: float

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        tokens, pairs = batch, 0.0
        for num_tokens, cached_tokens in chunks:
            if num_tokens:
                tokens += num_tokens
                pairs += num_tokens * (cached_tokens + (num_tokens + 1) / 2)
                context_tokens += cached_tokens
        return self.ratio * (self.tokens(tokens) + pairs * self.pair_s + context_tokens * self.context_s)
