"""What a dispatcher tells a door about one request, in order: (Queued,) Accepted, Delta..., Completed; errors raise.

A request for several answers is several to a dispatcher; the gateway makes them one again.

ClusterError
├── Rejected        admission refused or no worker in time (retry_after_s)
├── Unservable      the request can never work here (too long for the context or the pools)
├── DeadlinePassed  the caller's deadline; `phase` says where it passed
└── AttemptsSpent   every attempt failed; the last reason is in the message
"""

from dataclasses import dataclass

from msgspec import Struct

from cluster.ledger import LatencyLedger
from kvtransfer.ticket import TransferReport
from workers.request import FinishReason, TokenLogprobs


class ClusterError(Exception):
    """A request ended without finishing."""


class Rejected(ClusterError):
    """No room, or nobody to serve it, within the allowed wait. `cause`: one of `cluster.policy.promises.REASONS`."""

    def __init__(self, message: str, retry_after_s: float, cause: str = "other") -> None:
        super().__init__(message, retry_after_s, cause)
        self.message = message
        self.retry_after_s = retry_after_s
        self.cause = cause

    def __str__(self) -> str:
        return self.message


class Unservable(ClusterError):
    """Retrying cannot help; the message says which bound is broken, `field` what breaks it."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class DeadlinePassed(ClusterError):
    """The caller's deadline came first."""

    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        self.phase = phase

    def __str__(self) -> str:
        return f"the deadline passed during {self.phase}"


class AttemptsSpent(ClusterError):
    """Workers kept failing under this request."""


@dataclass(frozen=True, slots=True)
class Queued:
    """No worker has room for it yet: it waits in the gateway, behind `position` others. Seconds are predictions.

    Its turn comes in `predicted_start_s`; its first token `predicted_ttft_s` after it arrived. This is no promise yet.
    """

    request_id: str
    position: int
    predicted_start_s: float
    predicted_ttft_s: float
    reason: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """Workers are chosen and the decode side has promised its blocks. Sent again after a recovery (attempt > 0).

    The first token is predicted from the request's arrival; None: nothing is known yet. `index` tells several answers
    of one request apart.
    """

    request_id: str
    attempt: int
    prompt_tokens: int
    prefill_worker: str
    decode_worker: str
    reason: str
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    index: int = 0


class Delta(Struct, frozen=True, gc=False):
    """New tokens. `first_position` counts output tokens from 0; no position is ever sent twice.

    `prompt_logprobs`, when asked for, come with the first one: of the prompt's second token and those behind it.
    """

    tokens: tuple[int, ...]
    first_position: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How one of several answers ended. `mean_logprob`, of its tokens, only where it decided over the answer."""

    finish: FinishReason
    completion_tokens: int
    attempts: int
    ledger: LatencyLedger
    mean_logprob: float | None = None
    decode_workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The end. `transfers` has one report for each hand-off (none when colocated, several after recoveries or moves);
    `decode_workers` are those of the last attempt: the one that was accepted, then those that it moved to.

    Of several answers, `answers` has each one's end, by index; the rest then speaks of all that were made: tokens are
    summed (the prompt's counted once), `finish` is the first answer's, `ledger` that of the one that ended last.
    """

    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    attempts: int
    ledger: LatencyLedger
    transfers: tuple[TransferReport, ...]
    answers: tuple[AnswerEnd, ...] = ()
    decode_workers: tuple[str, ...] = ()


Event = Queued | Accepted | Delta | Completed
