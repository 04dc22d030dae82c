"""A workload: who asks when, with how long a prompt, and how long the answer will be. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

MOST_TOKENS = 10_000_000  # a longer prompt or answer is a mistake in the source, not a request
MOST_REQUESTS = 10_000_000  # of a synthetic workload; one request takes some 200 bytes


class WorkloadError(ValueError):
    """A trace or a description of a workload cannot be used; the message says where and what to write instead."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s` counts from the beginning of its workload; lengths are tokens, each at least 1.

    `prefix` names the prompt's blocks of `Workload.block_tokens` tokens: equal ids are equal blocks behind equal
    blocks. Empty: the prompt shares nothing with others; what lies behind the named blocks is shared with nobody
    either. The last block may be shorter.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in the order of time. `notes` say what was done to the source (jitter, clipping, another rate)."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 512
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise WorkloadError(f"{self.name} has no requests")
        if self.block_tokens < 1:
            raise WorkloadError(f"{self.name}: blocks must have at least 1 token, got {self.block_tokens}")
        for number, arrival in enumerate(self.arrivals):
            if problem := self._problem(arrival):
                raise WorkloadError(f"{self.name}, request {number}: {problem}")
        for number, (sooner, later) in enumerate(pairwise(self.arrivals)):
            if later.at_s < sooner.at_s:
                raise WorkloadError(f"{self.name}, request {number + 1}: time goes back from {sooner.at_s} s")

    def _problem(self, arrival: Arrival) -> str:
        """What is wrong with it; empty: nothing."""
        prompt, output = arrival.prompt_tokens, arrival.output_tokens
        if not 0.0 <= arrival.at_s < math.inf:
            return f"it comes at {arrival.at_s} s; times are numbers from 0 on"
        if not (1 <= prompt <= MOST_TOKENS and 1 <= output <= MOST_TOKENS):
            return f"prompt and output must have 1 to {MOST_TOKENS:,} tokens, got {prompt} and {output}"
        if (len(arrival.prefix) - 1) * self.block_tokens >= prompt:
            return (
                f"{len(arrival.prefix)} blocks of {self.block_tokens} tokens are more than the prompt of {prompt} has"
            )
        return ""

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s

    @property
    def rate(self) -> float:
        """Mean requests a second; 0 when all come at once."""
        return (len(self.arrivals) - 1) / self.duration_s if self.duration_s else 0.0

    def noted(self, arrivals: Sequence[Arrival], note: str) -> "Workload":
        """The same source, changed as the note says."""
        return replace(self, arrivals=tuple(arrivals), notes=(*self.notes, note))
