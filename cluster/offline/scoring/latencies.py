"""Latencies of all requests as arrays. Pure; imports numpy when called.

A request that did not finish has infinite latencies, so it misses every SLO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.offline.scoring.records import RequestOutcome, Served

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WORST = 10  # the worst gaps are one in 10, as in Mooncake (FAST'25)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds, one row per request in the run's order. `tpot_s` is 0 for answers of one token."""

    ttft_s: "Floats"
    tpot_s: "Floats"
    e2e_s: "Floats"
    output_tokens: "NDArray[np.int64]"  # received
    finished: "NDArray[np.bool_]"


def latencies(served: Sequence[Served]) -> Latencies:
    import numpy as np

    finished = np.array(
        [each.outcome is RequestOutcome.FINISHED and len(each.token_s) > 0 for each in served], dtype=bool
    )
    arrived = np.array([each.arrival_s for each in served])
    first = np.array([each.token_s[0] if ok else np.inf for each, ok in zip(served, finished, strict=True)])
    last = np.array([each.token_s[-1] if ok else np.inf for each, ok in zip(served, finished, strict=True)])
    tokens = np.array([len(each.token_s) for each in served], dtype=np.int64)
    tpot = np.full(len(served), np.inf)
    tpot[finished] = (last[finished] - first[finished]) / np.maximum(1, tokens[finished] - 1)
    return Latencies(first - arrived, tpot, last - arrived, tokens, finished)


def gaps(served: Sequence[Served]) -> "list[Floats]":
    """Seconds between consecutive tokens, for each request; empty for one that did not finish."""
    import numpy as np

    return [
        np.diff(np.asarray(each.token_s if each.outcome is RequestOutcome.FINISHED else (), float)) for each in served
    ]


def worst_mean_s(taken: "Floats") -> float:
    """The mean of the longest tenth of the gaps, at least one; 0 without gaps."""
    import numpy as np

    if not len(taken):
        return 0.0
    count = -(-len(taken) // WORST)
    return float(np.partition(taken, len(taken) - count)[-count:].mean())
