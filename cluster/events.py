"""Events of one request, in order: (Queued,) Accepted, Delta..., Completed; errors are raised.

A request for several answers is several requests to the dispatcher; the gateway merges their events.

ClusterError
├── Rejected        admission refused, or no worker in time (retry_after_s)
├── Unservable      the request can never work here: too long for the context or the pools
├── DeadlineExceeded  the caller's deadline passed, in `phase`
├── AttemptsExhausted   every attempt failed; the message has the last reason
└── NotComputable   the model's logits were not finite; another attempt would fail the same way
"""

from msgspec import Struct

from diptych.events import Accepted as Accepted
from diptych.events import AnswerEnd as AnswerEnd
from diptych.events import Completed as Completed
from diptych.events import Queued as Queued
from workers.request import TokenLogprobs


class ClusterError(Exception):
    """A request ended without finishing."""


class Rejected(ClusterError):
    """No room or no worker within the allowed wait. `cause`: one of `cluster.policy.slo_attainment.REASONS`."""

    def __init__(self, message: str, retry_after_s: float, cause: str = "other") -> None:
        super().__init__(message, retry_after_s, cause)
        self.message = message
        self.retry_after_s = retry_after_s
        self.cause = cause

    def __str__(self) -> str:
        return self.message


class Unservable(ClusterError):
    """A retry cannot help. The message has the limit, `field` the input that exceeds it."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class DeadlineExceeded(ClusterError):
    """The caller's deadline passed before the request finished."""

    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        self.phase = phase

    def __str__(self) -> str:
        return f"the deadline passed during {self.phase}"


class AttemptsExhausted(ClusterError):
    """Every attempt failed."""


class NotComputable(ClusterError):
    """The model's logits for this request are NaN or infinite."""


class Delta(Struct, frozen=True, gc=False):
    """New tokens. `first_position` counts output tokens from 0; no position is ever sent twice.

    The first delta has `prompt_logprobs`, if requested: from the prompt's second token on. `token_s`: when each token
    arrived, if that was before now. `pooled`: parts of the sum of hidden states, in the first delta, if requested.
    """

    tokens: tuple[int, ...]
    first_position: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    token_s: tuple[float, ...] = ()
    pooled: tuple[bytes, ...] = ()


Event = Queued | Accepted | Delta | Completed
