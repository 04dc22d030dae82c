"""Step times that are linear in the contents of the step: few coefficients, fitted to real workers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workers.costs.port import MAX_TOKENS, CostModel, check_non_negative


@dataclass(frozen=True, slots=True)
class LinearCost(CostModel):
    """Coefficients in seconds. The defaults fit a 135M-parameter model in float32 on one laptop core."""

    step_s: float = 0.048
    """Per step."""
    prefill_token_s: float = 0.0031
    """Per prompt token."""
    prefill_pair_s: float = 0.7e-6
    """Per prompt token and earlier token that it attends to."""
    decode_row_s: float = 0.0052
    """Per decode."""
    decode_context_s: float = 12.0e-6
    """Per decode and token of its context."""
    transfer_latency_s: float = 0.001
    """Per transfer."""
    transfer_byte_s: float = 1.0e-9
    """Per byte transferred."""
    swap_byte_s: float = 0.3e-9
    """Per byte swapped to host memory, or back."""

    def __post_init__(self) -> None:
        check_non_negative(self)

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        seconds = self.step_s + batch * self.decode_row_s + context_tokens * self.decode_context_s
        for num_tokens, cached_tokens in chunks:
            pairs = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2
            seconds += num_tokens * self.prefill_token_s + pairs * self.prefill_pair_s
        return seconds

    def prompt_tokens_within(
        self,
        seconds: float,
        cached_tokens: int = 0,
        chunks: Sequence[tuple[int, int]] = (),
        batch: int = 0,
        context_tokens: int = 0,
    ) -> int:
        seconds -= self.mixed_seconds(chunks, batch, context_tokens)
        if seconds <= 0.0:
            return 0
        if seconds == math.inf:
            return MAX_TOKENS
        # tokens * linear + tokens² * square <= seconds
        square = self.prefill_pair_s / 2
        linear = self.prefill_token_s + self.prefill_pair_s * (cached_tokens + 0.5)
        if square > 0.0:
            # Not (sqrt(…) - linear) / (2 * square), which loses all digits when the square is small.
            return int(min(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)), MAX_TOKENS))
        return int(min(seconds / linear, MAX_TOKENS)) if linear > 0.0 else MAX_TOKENS

    def scaled(self, ratio: float) -> "LinearCost":
        steps = ("step_s", "prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s")
        return replace(self, **{name: getattr(self, name) * ratio for name in steps})
