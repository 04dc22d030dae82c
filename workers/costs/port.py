"""The port behind which every source of step times stands, and what follows from its one primitive.

A step's seconds are those through all stages of a pipeline, and of all tensor ranks at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Self

from diptych.shapes import Shape

MOST_TOKENS = 1 << 40  # more than any prompt has: what no step time bounds


class CostModel(ABC):
    """Seconds of steps, transfers and swaps. `mixed_seconds` grows, or stays, with chunks and with context."""

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
        """The same machine, `ratio` times as slow at every step; transfers and swaps as they were."""

    def prefill_seconds(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """One step that computes a chunk of `num_tokens` behind `cached_tokens` computed ones, alone."""
        return self.mixed_seconds(((num_tokens, cached_tokens),), 0, 0)

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """One step that gives each of `batch` sequences a token; `context_tokens` is the sum of their contexts."""
        return self.mixed_seconds((), batch, context_tokens)

    def prompt_tokens_within(
        self,
        seconds: float,
        cached_tokens: int = 0,
        chunks: Sequence[tuple[int, int]] = (),
        batch: int = 0,
        context_tokens: int = 0,
    ) -> int:
        """The longest chunk behind `cached_tokens` with which the step of all these takes at most `seconds`.

        0 when the step takes longer without it; `MOST_TOKENS` at the most.
        """

        def fits(num_tokens: int) -> bool:
            return self.mixed_seconds((*chunks, (num_tokens, cached_tokens)), batch, context_tokens) <= seconds

        most = 1
        while fits(most):
            if most >= MOST_TOKENS:
                return MOST_TOKENS
            most *= 2
        least = most // 2  # fits, or is 0
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        return least

    def transfer_seconds(self, num_bytes: int) -> float:
        """Moving `num_bytes` from one worker's pool to another's, alone on the wire."""
        return self.transfer_latency_s + num_bytes * self.transfer_byte_s

    def swap_seconds(self, num_bytes: int) -> float:
        """Saving `num_bytes` of KV in host memory and bringing them back later."""
        return 2 * num_bytes * self.swap_byte_s


def step_seconds(shape: Shape, cost: CostModel) -> float:
    """What the cost model says of a step of this shape."""
    step_s = cost.mixed_seconds(shape.chunks, shape.batch, shape.batch * shape.context)
    return step_s + cost.swap_seconds(shape.swap_bytes)


def refuse_nonsense(cost: Any) -> None:
    """Every number of a cost model must be 0 or more and finite. Raises ValueError, which names the field."""
    for field in fields(cost):
        value = getattr(cost, field.name)
        numeric = isinstance(value, int | float)
        if field.type in (int, float) and not (numeric and 0.0 <= value < math.inf):  # NaN fails too
            raise ValueError(f"cost.{field.name} is {value}; it must be 0 or more, and finite")
