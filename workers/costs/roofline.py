"""A step is as long as its arithmetic or its memory traffic, whichever is longer, plus what neither hides.

Williams et al., Roofline (CACM 2009), for a decoder: arithmetic grows with tokens, traffic is the weights and the KV.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from workers.costs.profiled import ProfiledCost


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost(ProfiledCost):
    """Seconds through all stages, tensor parallelism included.

    Arithmetic: `token_s` for each token computed, `pair_s` for each token that it attends to, `row_s` for each decode
    (the head; of a prompt it computes one token, which is not counted). Traffic: `weights_s` in
    every step, `context_s` for each token of KV that is read. Always: `fixed_s` for launches and latencies, and
    `send_token_s` for what ranks and stages tell each other of each token.
    """

    token_s: float
    pair_s: float
    row_s: float
    weights_s: float
    context_s: float
    fixed_s: float
    send_token_s: float = 0.0

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        tokens, pairs = batch, float(context_tokens)
        for num_tokens, cached_tokens in chunks:
            if num_tokens:
                tokens += num_tokens
                pairs += num_tokens * (cached_tokens + (num_tokens + 1) / 2)
                context_tokens += cached_tokens
        compute_s = tokens * self.token_s + pairs * self.pair_s + batch * self.row_s
        memory_s = self.weights_s + context_tokens * self.context_s
        return self.ratio * (max(compute_s, memory_s) + self.fixed_s + tokens * self.send_token_s)
