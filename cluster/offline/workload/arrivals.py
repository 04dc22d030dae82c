"""A workload: requests with arrival times, prompt lengths and output lengths. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

MAX_TOKENS = 10_000_000  # a longer prompt or answer is an error in the source
MAX_REQUESTS = 10_000_000  # a request takes about 200 bytes of memory


class WorkloadError(ValueError):
    """A trace or workload description is invalid; the message says where and what to write instead."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s` counts from the beginning of the workload; lengths are in tokens, at least 1.

    `prefix` has the ids of the prompt's blocks of `Workload.block_tokens` tokens (the last one may be shorter): prompts
    share the tokens of their common leading ids. Tokens after the last named block are shared with no other prompt.

    `sample` k above 0: answer k to the prompt of the arrival k places before it, which asks for several answers.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    session: str = ""
    sample: int = 0


def mean_lengths(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Mean tokens of prompts, and of answers."""
    count = len(arrivals)
    return sum(each.prompt_tokens for each in arrivals) / count, sum(each.output_tokens for each in arrivals) / count


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals ordered by time. `notes` list the changes made to the source (jitter, clipping, another rate)."""

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
        if self.arrivals[0].sample:
            raise WorkloadError(f"{self.name}, request 0: it is a further answer to a request that is missing")
        for number, (sooner, later) in enumerate(pairwise(self.arrivals)):
            if later.at_s < sooner.at_s:
                raise WorkloadError(f"{self.name}, request {number + 1}: time goes back from {sooner.at_s} s")
            if later.sample and later != replace(sooner, sample=sooner.sample + 1):
                raise WorkloadError(f"{self.name}, request {number + 1}: answer {later.sample} follows another request")

    def _problem(self, arrival: Arrival) -> str:
        """Why the request is invalid; empty if it is valid."""
        prompt, output = arrival.prompt_tokens, arrival.output_tokens
        if not 0.0 <= arrival.at_s < math.inf:
            return f"it arrives at {arrival.at_s} s; times are finite and at least 0"
        if not (1 <= prompt <= MAX_TOKENS and 1 <= output <= MAX_TOKENS):
            return f"prompt and output must have 1 to {MAX_TOKENS:,} tokens, got {prompt} and {output}"
        if (len(arrival.prefix) - 1) * self.block_tokens >= prompt:
            return (
                f"{len(arrival.prefix)} blocks of {self.block_tokens} tokens are more than the prompt of {prompt} has"
            )
        return ""

    def num_answers(self, index: int) -> int:
        """How many answers the request at `index`, a first one, asks for."""
        end = index + 1
        while end < len(self.arrivals) and self.arrivals[end].sample:
            end += 1
        return end - index

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s

    @property
    def rate(self) -> float:
        """Mean requests/s; 0 if all arrive at once."""
        return (len(self.arrivals) - 1) / self.duration_s if self.duration_s else 0.0

    def with_note(self, arrivals: Sequence[Arrival], note: str) -> "Workload":
        """The workload with other arrivals and one more note."""
        return replace(self, arrivals=tuple(arrivals), notes=(*self.notes, note))
