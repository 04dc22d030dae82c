"""What a run leaves behind, real or simulated: one record for each request, worker and (when traced) step. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.observe.ledger import LatencyLedger


class RequestOutcome(Enum):
    """How a request ended for its client."""

    FINISHED = "finished"
    REJECTED = "rejected"  # admission said no
    FAILED = "failed"  # deadline, attempts spent, or an error
    UNFINISHED = "unfinished"  # the run was cut off


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it. Times are seconds on the run's clock.

    `token_s`: when each output token came. `reason`: why it did not finish, in words that others share. `ledger`: only
    of finished requests. `transfer_s` sums the hand-offs' elapsed seconds, most of which overlap with prefill; the
    ledger's `transfer_wait` is what was not hidden.
    """

    index: int  # in the workload
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # that it was to get
    token_s: Sequence[float]
    ending: RequestOutcome
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
    prompt_tokens: int = 0  # computed, recomputed ones counted again
    output_tokens: int = 0
    used_block_s: float = 0.0
    preemptions: int = 0
    swaps: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker, when the run was traced. `requests`: the workload's indices whose tokens it computed."""

    worker: str
    begin_s: float
    end_s: float
    prompt_tokens: int
    batch: int  # decodes
    requests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that is known of one run. `gpus` counts all that were provisioned, idle ones too.

    `model_flops` are those of all tokens computed, `peak_flops` of all GPUs together per second; 0: not known.
    """

    system: str
    workload: str
    clock: str  # "virtual" or "real"
    seed: int
    gpus: int
    seconds: float  # from the first arrival to the last token
    wall_s: float
    served: tuple[Served, ...]
    workers: tuple[WorkerRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    model_flops: float = 0.0
    peak_flops: float = 0.0
    notes: tuple[str, ...] = ()
