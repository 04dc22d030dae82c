"""What a dispatcher tells a door about one request, in order: (Queued,) Accepted, Delta..., Completed; errors raise.

A request for several answers is several to a dispatcher; the gateway makes them one again.

ClusterError
├── Rejected        admission refused or no worker in time (retry_after_s)
├── Unservable      the request can never work here (too long for the context or the pools)
├── DeadlinePassed  the caller's deadline; `phase` says where it passed
├── AttemptsSpent   every attempt failed; the last reason is in the message
└── NotComputable   the model gave no finite numbers for it; another attempt would end in the same way
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


class NotComputable(ClusterError):
    """The model's logits for this request are NaN or infinite."""


class Delta(Struct, frozen=True, gc=False):
    """New tokens. `first_position` counts output tokens from 0; no position is ever sent twice.

    `prompt_logprobs`, when asked for, come with the first one: of the prompt's second token and those behind it.
    """

    tokens: tuple[int, ...]
    first_position: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


Event = Queued | Accepted | Delta | Completed
