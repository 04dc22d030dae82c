"""A workload: who asks when, with how long a prompt, and how long the answer will be. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


class WorkloadError(ValueError):
    """A trace or a description of a workload cannot be used; the message says where and what to write instead."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at_s` counts from the beginning of its workload; lengths are tokens, each at least 1.

    `prefix` names the prompt's blocks of `Workload.block_tokens` tokens: equal ids are equal blocks behind equal
    blocks. Empty: the prompt shares nothing with others. The last block may be shorter.
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
        for number, arrival in enumerate(self.arrivals):
            if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
                raise WorkloadError(
                    f"{self.name}, request {number}: prompt and output must be at least 1 token, "
                    f"got {arrival.prompt_tokens} and {arrival.output_tokens}"
                )
        for number, (sooner, later) in enumerate(zip(self.arrivals, self.arrivals[1:], strict=False)):
            if not 0.0 <= sooner.at_s <= later.at_s:
                raise WorkloadError(f"{self.name}, request {number + 1}: time goes back from {sooner.at_s} s")

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
