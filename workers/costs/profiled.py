"""Step times of published measurements, and of data sheets.

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

from workers.costs.port import CostModel, refuse_nonsense


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCost(CostModel):
    """What all share: a link, a swap, and `ratio`, which multiplies every step.

    Seconds, and seconds for each byte; without a network both transfers are free.
    """

    transfer_latency_s: float = 0.0
    transfer_byte_s: float = 0.0
    swap_byte_s: float = 0.0
    ratio: float = 1.0

    def __post_init__(self) -> None:
        refuse_nonsense(self)

    def scaled(self, ratio: float) -> Self:
        return replace(self, ratio=self.ratio * ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost(ProfiledCost):
    """A step is as long as its arithmetic or its memory traffic, whichever is longer, plus what neither hides.

    Seconds through all stages, tensor parallelism included.

    Arithmetic: `token_s` for each token computed, `pair_s` for each token that it attends to, `row_s` for each decode
    (the head; of a prompt it computes one token, which is not counted). Traffic: `weights_s` in
    every step, `context_s` for each token of KV that is read. Always: `fixed_s` for launches and latencies, and
    `send_token_s` for what ranks and stages tell each other of each token.
    """

    token_s: float
    pair_s: float
    row_s: float
    weights_s: float
    context_s: float
    fixed_s: float
    send_token_s: float = 0.0

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        tokens, pairs = batch, float(context_tokens)
        for num_tokens, cached_tokens in chunks:
            if num_tokens:
                tokens += num_tokens
                pairs += num_tokens * (cached_tokens + (num_tokens + 1) / 2)
                context_tokens += cached_tokens
        compute_s = tokens * self.token_s + pairs * self.pair_s + batch * self.row_s
        memory_s = self.weights_s + context_tokens * self.context_s
        return self.ratio * (max(compute_s, memory_s) + self.fixed_s + tokens * self.send_token_s)


Fit = tuple[float, float, float]


def _nothing_negative(fit: Fit) -> Fit:
    """A least-squares fit may fall with the work by a hair; a step time does not."""
    a, b, c = fit
    return max(0.0, a), max(0.0, b), max(0.0, c)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedCost(ProfiledCost):
    """DistServe's step times, in seconds through all stages: one fit for prefills, two for decodes.

    A prefill of prompts l costs a + b * sum(l) + c * sum(l²); a chunk of n behind p cached tokens has n(n + 2p) in the
    place of l². A decode costs a + b * context + c * batch, by `small_batch` below `border` sequences and by
    `large_batch` from there on; where the fits meet, a step may get shorter by one more decode. Every step costs
    `overhead_s` and `overhead_token_s` for each token that its sequences have, and a prefill `prefill_stages_s`.

    DistServe mixes no phases. A mixed step here is the prefill and the decode with one fixed cost, the larger one: the
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

    @classmethod
    def of_milliseconds(cls, prefill: Fit, small: Fit, large: Fit, border: int, pipeline: int) -> "PhasedCost":
        """From the published coefficients, in ms: 2 ms and 1e-4 ms for each token on the first stage, and 1 ms times
        the number of stages on every stage of a prefill."""
        fits = [_nothing_negative((a / 1e3, b / 1e3, c / 1e3)) for a, b, c in (prefill, small, large)]
        return cls(
            prefill=fits[0],
            small_batch=fits[1],
            large_batch=fits[2],
            border=border,
            overhead_s=2e-3,
            overhead_token_s=1e-7,
            prefill_stages_s=1e-3 * pipeline * pipeline,
        )

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
    """Piecewise-linear through (xs, ys): both rising, x strictly. Raises ValueError on points that are not.

    Left of the first point it stays at the first value, right of the last it goes on as steeply as between the last
    two. One point is a constant.
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
        """Through measured points; one below an earlier one is noise and is lifted to it."""
        sound = sorted(points)
        return cls(tuple(x for x, _ in sound), tuple(accumulate((y for _, y in sound), max)))

    def plus(self, fixed: float, slope: float) -> "StepCurve":
        """The curve with fixed + slope * x more."""
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
    """Splitwise's measured steps: piecewise-linear in the prompt tokens of a step, and in the batch of a decode.

    `prompt` is one prompt by its tokens, `prompts` several by the sum of theirs, `decode` the seconds by batch. Several
    take at least what the longest takes alone. The table knows no context, so a decode costs the same at any. It knows
    no cached prefix either: each of a chunk's tokens counts as 1 + cached * `attention_share` tokens, the part of its
    FLOPs that attending to one more token adds. A mixed step costs `mixed_factor` of a prompt step that has the decodes
    among its tokens, as in the released simulator; that is slower than a pure one, and never faster than its decodes.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredCost(ProfiledCost):
    """Measured times of everything in a layer but attention, by the tokens of a step, and attention by arithmetic.

    `tokens` holds all layers, sums of tensor ranks and sends between stages: prompts and decodes are the same to it. A
    prompt token adds `pair_s` for each token that it attends to, a decode `context_s` for each of its context; a chunk
    reads the cached tokens before it once, `context_s` each.
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
