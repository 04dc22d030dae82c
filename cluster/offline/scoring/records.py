"""Records of a real or simulated run: one for each request, worker and, if traced, step; latencies of all, as arrays.

Pure; imports numpy when called.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cluster.observe.ledger import LatencyLedger
from diptych.view import TierStats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


WORST = 10  # the worst gaps are one in 10, as in Mooncake (FAST'25)


class RequestOutcome(Enum):
    """How a request ended for its client."""

    FINISHED = "finished"
    REJECTED = "rejected"  # by admission control
    FAILED = "failed"  # deadline, no attempts left, or an error
    UNFINISHED = "unfinished"  # the run was cut off


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds on the run's clock.

    `token_s`: when each output token arrived. `reason`: the category under which failures are counted. `ledger`: only
    of finished requests. `transfer_s` sums the elapsed seconds of KV handoffs, most of which overlap with prefill; the
    ledger's `transfer_wait` is the part that does not.
    """

    index: int  # in the workload
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # requested
    token_s: Sequence[float]
    outcome: RequestOutcome
    detail: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    cached_tokens: int = 0
    attempts: int = 1
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    ledger: LatencyLedger | None = None
    reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return self.token_s[0] - self.arrival_s if len(self.token_s) else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds for each token after the first; 0 for an answer of one token."""
        count = len(self.token_s)
        if count == 0:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (count - 1) if count > 1 else 0.0

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last token."""
        return self.token_s[-1] - self.arrival_s if len(self.token_s) else None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker over a whole run. `gpus`: its ranks. `busy_s`: time with a step in flight.

    `used_block_s` is the integral of used blocks over time: divided by `kv_blocks` and the run's seconds it is the
    occupancy.
    """

    name: str
    pool: str
    role: str
    gpus: int
    kv_blocks: int
    steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0  # computed; recomputed ones count again
    output_tokens: int = 0
    used_block_s: float = 0.0
    preemptions: int = 0
    sources: tuple[TierStats, ...] = ()  # where prompts found cached tokens


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker of a traced run. `requests`: indices in the workload of the requests in the batch."""

    worker: str
    begin_s: float
    end_s: float
    prompt_tokens: int
    batch: int  # decodes
    requests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `gpus` counts all that were provisioned, idle ones included.

    `model_flops`: for all computed tokens; `peak_flops`: per second of all GPUs together; 0: unknown.
    """

    system: str
    workload: str
    clock: str  # "virtual" or "real"
    seed: int
    gpus: int
    seconds: float  # from the first arrival to the last token
    wall_s: float
    served: tuple[RequestRecord, ...]
    workers: tuple[WorkerRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    model_flops: float = 0.0
    peak_flops: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds, one row per request in the run's order. `tpot_s` is 0 for answers of one token.

    A request that did not finish has infinite latencies, so it misses every SLO.
    """

    ttft_s: "Floats"
    tpot_s: "Floats"
    e2e_s: "Floats"
    output_tokens: "NDArray[np.int64]"  # received
    finished: "NDArray[np.bool_]"


def latencies(served: Sequence[RequestRecord]) -> Latencies:
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


def gaps(served: Sequence[RequestRecord]) -> "list[Floats]":
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
