"""Step times read off measured curves. Patel et al., Splitwise (ISCA'24), and Agrawal et al., Vidur (MLSys'24)."""

from collections.abc import Iterable
from dataclasses import dataclass

from workers.costs.curve import Curve
from workers.costs.profiled import ProfiledCost


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost(ProfiledCost):
    """Splitwise's measured steps: piecewise-linear in the prompt tokens of a step, and in the batch of a decode.

    `prompt` is one prompt by its tokens, `prompts` several by the sum of theirs, `decode` the seconds by batch. Several
    take at least what the longest takes alone. The table knows no context, so a decode costs the same at any. It knows
    no cached prefix either: each of a chunk's tokens counts as 1 + cached * `attention_share` tokens, the part of its
    FLOPs that attending to one more token adds. A mixed step costs `mixed_factor` of a prompt step that has the decodes
    among its tokens, as in the released simulator; that is slower than a pure one, and never faster than its decodes.
    """

    prompt: Curve
    prompts: Curve
    decode: Curve
    attention_share: float
    mixed_factor: float = 1.1

    def __post_init__(self) -> None:
        super(TableCost, self).__post_init__()
        if self.mixed_factor < 1.0:
            raise ValueError(f"cost.mixed_factor is {self.mixed_factor}; a decode makes no prompt step shorter")

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        tokens = longest = 0.0
        count = 0
        for num_tokens, cached_tokens in chunks:
            if num_tokens:
                counted = num_tokens * (1.0 + cached_tokens * self.attention_share)
                tokens += counted
                longest = max(longest, counted)
                count += 1
        if not count:
            return self.ratio * (self.decode(batch) if batch else min(self.decode.ys[0], self.prompt.ys[0]))
        seconds = self.prompt(longest + batch)
        if count > 1:
            seconds = max(seconds, self.prompts(tokens + batch))
        if batch:
            seconds = max(self.decode(batch), seconds * self.mixed_factor)
        return self.ratio * seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredCost(ProfiledCost):
    """Measured times of everything in a layer but attention, by the tokens of a step, and attention by arithmetic.

    `tokens` holds all layers, sums of tensor ranks and sends between stages: prompts and decodes are the same to it. A
    prompt token adds `pair_s` for each token that it attends to, a decode `context_s` for each of its context; a chunk
    reads the cached tokens before it once, `context_s` each.
    """

    tokens: Curve
    pair_s: float
    context_s: float

    def mixed_seconds(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        tokens, pairs = batch, 0.0
        for num_tokens, cached_tokens in chunks:
            if num_tokens:
                tokens += num_tokens
                pairs += num_tokens * (cached_tokens + (num_tokens + 1) / 2)
                context_tokens += cached_tokens
        return self.ratio * (self.tokens(tokens) + pairs * self.pair_s + context_tokens * self.context_s)
