"""Step times that are linear in the contents of the step, but at least a read of the weights, and steeper for large
steps: few coefficients, fitted to real workers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workers.costs.port import MAX_TOKENS, CostModel, check_non_negative

OF_STEPS = (
    *("step_s", "prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s"),
    *("weights_s", "large_token_s"),
)


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
    weights_s: float = 0.0
    """Per step, to read the weights, if that takes longer than to compute its tokens at `prefill_token_s` each."""
    large_step_tokens: float = 0.0
    """Tokens of a step, prompts and decodes, beyond which each takes `large_token_s` more."""
    large_token_s: float = 0.0
    """Per token beyond `large_step_tokens`: activations that outgrow a cache."""

    def __post_init__(self) -> None:
        check_non_negative(self)
        if self.weights_s and self.decode_row_s < self.prefill_token_s:
            raise ValueError(
                f"cost.decode_row_s is {self.decode_row_s}; with weights_s it must be at least prefill_token_s "
                f"({self.prefill_token_s}), since a decode is one token to compute"
            )

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        seconds = self.step_s + batch * self.decode_row_s + context_tokens * self.decode_context_s
        tokens = batch
        for num_tokens, cached_tokens in chunks:
            pairs = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2
            seconds += num_tokens * self.prefill_token_s + pairs * self.prefill_pair_s
            tokens += num_tokens
        seconds += max(0.0, tokens - self.large_step_tokens) * self.large_token_s
        return seconds + (max(0.0, self.weights_s - tokens * self.prefill_token_s) if tokens else 0.0)

    def prompt_tokens_within(
        self,
        seconds: float,
        cached_tokens: int = 0,
        chunks: Sequence[tuple[int, int]] = (),
        batch: int = 0,
        context_tokens: int = 0,
    ) -> int:
        others = batch + sum(tokens for tokens, _ in chunks)
        seconds -= self.mixed_seconds(chunks, batch, context_tokens) + (0.0 if others else self.weights_s)
        if seconds < 0.0:
            return 0
        if seconds == math.inf:
            return MAX_TOKENS
        # The step's seconds are the largest of three: the weights are read, tokens are computed, more tokens than
        # `large_step_tokens` are computed. A chunk fits if it fits all three.
        token_s, hidden_s = self.prefill_token_s, max(0.0, self.weights_s - others * self.prefill_token_s)
        small_s = max(0.0, self.large_step_tokens - others) * self.large_token_s
        return min(
            self._tokens_within(seconds, cached_tokens, 0.0),
            self._tokens_within(seconds + hidden_s, cached_tokens, token_s),
            self._tokens_within(seconds + hidden_s + small_s, cached_tokens, token_s + self.large_token_s),
        )

    def _tokens_within(self, seconds: float, cached_tokens: int, token_s: float) -> int:
        """Of a chunk that takes `token_s` for each token and `prefill_pair_s` for each pair."""
        # tokens * linear + tokens² * square <= seconds
        square = self.prefill_pair_s / 2
        linear = token_s + self.prefill_pair_s * (cached_tokens + 0.5)
        if square > 0.0:
            # Not (sqrt(…) - linear) / (2 * square), which loses all digits when the square is small.
            return int(min(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)), MAX_TOKENS))
        return int(min(seconds / linear, MAX_TOKENS)) if linear > 0.0 else MAX_TOKENS

    def scaled(self, ratio: float) -> "LinearCost":
        return replace(self, **{name: getattr(self, name) * ratio for name in OF_STEPS})
