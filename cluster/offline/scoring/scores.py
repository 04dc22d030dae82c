"""Scores that other papers judge by: Splitwise's nine slowdowns and FastGen's effective throughput. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from cluster.offline.scoring.latencies import latencies
from cluster.offline.scoring.records import Ending, Run

if TYPE_CHECKING:
    from cluster.offline.scoring.latencies import Floats

METRICS = ("TTFT", "TBT", "E2E")
PERCENTILES = (50, 90, 99)
# Bounds on each metric's P50, P90 and P99, as multiples of what the request takes on an idle machine (Splitwise).
SPLITWISE = ((2.0, 3.0, 6.0), (1.25, 1.5, 5.0), (1.25, 1.5, 5.0))
PROMPT_TOKENS_RATE = 512.0  # FastGen: TTFT at most prompt tokens / 512 s
EMA_SPAN = 16  # tokens, of FastGen's moving average of gaps

Unloaded = Callable[[int, int], tuple[float, float]]  # prompt and output tokens -> TTFT and TPOT, seconds


@dataclass(frozen=True, slots=True)
class NineWay:
    """Slowdowns by [metric][percentile], as `METRICS` and `PERCENTILES` name them; infinite: too few served."""

    slowdowns: tuple[tuple[float, ...], ...]
    bounds: tuple[tuple[float, ...], ...] = SPLITWISE

    @property
    def broken(self) -> tuple[str, ...]:
        """The bounds that do not hold, as `TTFT P90 3.4x > 3x`."""
        return tuple(
            f"{metric} P{percentile} {slowdown:.3g}x > {bound:g}x"
            for metric, slowdowns, bounds in zip(METRICS, self.slowdowns, self.bounds, strict=True)
            for percentile, slowdown, bound in zip(PERCENTILES, slowdowns, bounds, strict=True)
            if slowdown > bound
        )

    @property
    def met(self) -> bool:
        return not self.broken


def nine_way(run: Run, unloaded: Unloaded, bounds: tuple[tuple[float, ...], ...] = SPLITWISE) -> NineWay:
    """Each request against itself on an idle reference machine; TBT is a request's mean gap.

    A percentile is the least slowdown that so many percent of all requests do not exceed; a request that was not
    served has an infinite one. Answers of one token have no TBT and are left out of it. Raises ValueError where
    `unloaded` gives no time.
    """
    import numpy as np

    each = latencies(run.served)
    alone = np.array([unloaded(served.prompt_tokens, served.output_tokens) for served in run.served]).reshape(-1, 2)
    if (alone <= 0.0).any():
        raise ValueError("unloaded TTFT and TPOT must be above 0 seconds: slowdowns are multiples of them")
    outputs = np.array([served.output_tokens for served in run.served])
    several = outputs > 1
    slowdowns = (
        each.ttft_s / alone[:, 0],
        each.tpot_s[several] / alone[several, 1],
        each.e2e_s / (alone[:, 0] + (outputs - 1) * alone[:, 1]),
    )
    return NineWay(tuple(_reached(values) for values in slowdowns), bounds)


def _reached(slowdowns: "Floats") -> tuple[float, ...]:
    import numpy as np

    if not len(slowdowns):
        return tuple(0.0 for _ in PERCENTILES)
    return tuple(float(value) for value in np.percentile(slowdowns, PERCENTILES, method="inverted_cdf"))


def effective_throughput(run: Run, tokens_rate: float) -> float:
    """Requests a second whose prompt and whose answer both came fast enough (DeepSpeed-FastGen).

    TTFT is at most prompt tokens / 512 s, and the moving average of the gaps (span 16 tokens, weights that sum to 1
    from the first gap on) stays below 1 / `tokens_rate` at every token.
    """
    kept = 0
    for served in run.served:
        if served.ending is Ending.FINISHED and served.ttft_s is not None:
            in_time = served.ttft_s <= served.prompt_tokens / PROMPT_TOKENS_RATE
            kept += in_time and _slowest_average_s(served.token_s) < 1.0 / tokens_rate
    return kept / run.seconds if run.seconds > 0.0 else 0.0


def _slowest_average_s(token_s: Sequence[float]) -> float:
    keep = 1.0 - 2.0 / (EMA_SPAN + 1.0)
    weighted = weights = slowest = 0.0
    for sooner, later in pairwise(token_s):
        weighted, weights = later - sooner + keep * weighted, 1.0 + keep * weights
        slowest = max(slowest, weighted / weights)
    return slowest
