"""The port of all cost models, what follows from its one primitive, and a model corrected by the steps that ran.

A step's seconds are those through all pipeline stages, with all tensor ranks in parallel.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from diptych.shapes import Shape

MAX_TOKENS = 1 << 40  # more than any prompt has


class CostModel(ABC):
    """Seconds of steps, transfers and swaps. `mixed_seconds` never decreases with more chunks or context."""

    __slots__ = ()

    transfer_latency_s: float
    transfer_byte_s: float
    swap_byte_s: float

    @abstractmethod
    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """One step of prompt chunks, each (tokens, cached tokens before them), fused with `batch` decodes.

        `context_tokens` is the sum of the decodes' contexts.
        """

    @abstractmethod
    def scaled(self, ratio: float) -> Self:
        """Every step `ratio` times as long; transfers and swaps unchanged."""

    def steps_seconds(self, batch: int, context_tokens: int, count: int) -> list[float]:
        """So many steps of the same decodes in a row. `context_tokens`: of the first one."""
        return [self.mixed_seconds((), batch, context_tokens + each * batch) for each in range(count)]

    def prefill_seconds(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """One step with only a chunk of `num_tokens` after `cached_tokens` cached ones."""
        return self.mixed_seconds(((num_tokens, cached_tokens),), 0, 0)

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """One step with only `batch` decodes; `context_tokens` is the sum of their contexts."""
        return self.mixed_seconds((), batch, context_tokens)

    def prompt_tokens_within(
        self,
        seconds: float,
        cached_tokens: int = 0,
        chunks: Sequence[tuple[int, int]] = (),
        batch: int = 0,
        context_tokens: int = 0,
    ) -> int:
        """The longest chunk after `cached_tokens` with which the whole step takes at most `seconds`.

        0 when the step takes longer even without it; at most `MAX_TOKENS`.
        """

        def fits(num_tokens: int) -> bool:
            return self.mixed_seconds((*chunks, (num_tokens, cached_tokens)), batch, context_tokens) <= seconds

        most = 1
        while fits(most):
            if most >= MAX_TOKENS:
                return MAX_TOKENS
            most *= 2
        least = most // 2  # fits, or is 0
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        return least

    def transfer_seconds(self, num_bytes: int) -> float:
        """Moving `num_bytes` between two workers, without contention."""
        return self.transfer_latency_s + num_bytes * self.transfer_byte_s

    def swap_seconds(self, num_bytes: int) -> float:
        """Swapping `num_bytes` of KV out to host memory and back in."""
        return 2 * num_bytes * self.swap_byte_s


@dataclass(frozen=True, slots=True)
class CorrectedCost(CostModel):
    """Decodes and a step's fixed cost take `decode` times as long as in the `given` model; prompts `prompt` times."""

    given: CostModel
    decode: float
    prompt: float
    transfer_latency_s: float
    transfer_byte_s: float
    swap_byte_s: float

    @classmethod
    def of(cls, given: CostModel, decode: float, prompt: float) -> CostModel:
        """`given` itself if both ratios are 1."""
        if decode == prompt == 1.0:
            return given
        return cls(given, decode, prompt, given.transfer_latency_s, given.transfer_byte_s, given.swap_byte_s)

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        return self.prompt * self.given.mixed_seconds(chunks, batch, context_tokens) + self._more(batch, context_tokens)

    def _more(self, batch: int, context_tokens: int) -> float:
        return (self.decode - self.prompt) * self.given.decode_seconds(batch, context_tokens)

    def prompt_tokens_within(
        self,
        seconds: float,
        cached_tokens: int = 0,
        chunks: Sequence[tuple[int, int]] = (),
        batch: int = 0,
        context_tokens: int = 0,
    ) -> int:
        given_s = (seconds - self._more(batch, context_tokens)) / self.prompt
        return self.given.prompt_tokens_within(given_s, cached_tokens, chunks, batch, context_tokens)

    def scaled(self, ratio: float) -> "CorrectedCost":
        return replace(self, decode=ratio * self.decode, prompt=ratio * self.prompt)


def step_seconds(shape: Shape, cost: CostModel) -> float:
    """The predicted seconds of a step of this shape."""
    step_s = cost.mixed_seconds(shape.chunks, shape.batch, shape.batch * shape.context)
    return step_s + cost.swap_seconds(shape.swap_bytes)


def check_non_negative(record: Any, prefix: str = "cost.", error: type[ValueError] = ValueError) -> None:
    """Raises `error`, which names the field, unless every number of a dataclass is finite and 0 or more."""
    for field in fields(record):
        value = getattr(record, field.name)
        numeric = isinstance(value, int | float)
        if field.type in (int, float) and not (numeric and 0.0 <= value < math.inf):  # NaN fails too
            raise error(f"{prefix}{field.name} is {value}; it must be 0 or more, and finite")
