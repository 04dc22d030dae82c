"""DistServe's step times: one fit for prefills, two for decodes. Zhong et al., DistServe (OSDI'24), appendix A.

The formulas are those of the released simulator (`simdistserve/estimators/time_estimator.py` and `base/worker.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from workers.costs.profiled import ProfiledCost

Fit = tuple[float, float, float]


def _nothing_negative(fit: Fit) -> Fit:
    """A least-squares fit may fall with the work by a hair; a step time does not."""
    a, b, c = fit
    return max(0.0, a), max(0.0, b), max(0.0, c)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedCost(ProfiledCost):
    """Seconds through all stages.

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
