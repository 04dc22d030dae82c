"""A cost model corrected by the steps that ran."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workers.costs.port import CostModel


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
