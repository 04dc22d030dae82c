"""What a step and a transfer cost in seconds: few coefficients, all linear, fitted from real workers.

The router predicts with it, the modelled executor and the simulator sleep by it. Pure: no clock, no device.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds. The defaults fit a 135M-parameter model in float32 on one laptop core.

    A step costs `step_s` whatever it holds. A prompt token adds `prefill_token_s` (weights) and `prefill_pair_s` for
    every earlier token that it attends to. A decode adds `decode_row_s`, and `decode_context_s` for every token of its
    context. A transfer costs `transfer_latency_s` and `transfer_byte_s` for each byte; a swap to host memory, or back,
    `swap_byte_s` for each byte.
    """

    step_s: float = 0.048
    prefill_token_s: float = 0.0031
    prefill_pair_s: float = 0.7e-6
    decode_row_s: float = 0.0052
    decode_context_s: float = 12.0e-6
    transfer_latency_s: float = 0.001
    transfer_byte_s: float = 1.0e-9
    swap_byte_s: float = 0.3e-9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0.0:  # NaN fails too
                raise ValueError(f"cost.{field.name} is {value}; it must be 0 or more seconds")

    def prefill_seconds(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """One step that computes a chunk of `num_tokens` behind `cached_tokens` computed ones, alone."""
        return self.mixed_seconds(((num_tokens, cached_tokens),), 0, 0)

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """One step that gives each of `batch` sequences a token; `context_tokens` is the sum of their contexts."""
        return self.mixed_seconds((), batch, context_tokens)

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """One step of prompt chunks, each (tokens, cached tokens before them), fused with decodes."""
        seconds = self.step_s + batch * self.decode_row_s + context_tokens * self.decode_context_s
        for num_tokens, cached_tokens in chunks:
            pairs = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2
            seconds += num_tokens * self.prefill_token_s + pairs * self.prefill_pair_s
        return seconds

    def prompt_tokens_within(self, seconds: float, cached_tokens: int = 0) -> int:
        """The longest chunk behind `cached_tokens` that adds at most `seconds` to a step."""
        if seconds <= 0.0:
            return 0
        # tokens * linear + tokens² * square <= seconds
        square = self.prefill_pair_s / 2
        linear = self.prefill_token_s + self.prefill_pair_s * (cached_tokens + 0.5)
        if square > 0.0:
            return int((math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square))
        return int(min(seconds / linear, sys.maxsize)) if linear > 0.0 else sys.maxsize

    def swap_seconds(self, num_bytes: int) -> float:
        """Saving `num_bytes` of KV in host memory and bringing them back later."""
        return 2 * num_bytes * self.swap_byte_s

    def scaled(self, ratio: float) -> "CostModel":
        """The same machine, `ratio` times as slow at every step; transfers and swaps as they were."""
        steps = ("step_s", "prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s")
        return replace(self, **{name: getattr(self, name) * ratio for name in steps})

    def transfer_seconds(self, num_bytes: int) -> float:
        """Moving `num_bytes` from one worker's pool to another's, alone on the wire."""
        return self.transfer_latency_s + num_bytes * self.transfer_byte_s
