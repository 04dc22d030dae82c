"""Shapes of steps, and measured times of steps. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: prompt chunks, each (tokens, tokens before them), and `batch` decodes of `context` tokens each.

    `swap_bytes` of KV are saved to host memory before the step, and restored.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    batch: int = 0
    context: int = 0
    swap_bytes: int = 0

    @property
    def kind(self) -> str:
        return "mixed" if self.chunks and self.batch else "prompts" if self.chunks else "decodes"

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(tokens, tokens before them) of every sequence, decodes first."""
        return (*((1, self.context - 1),) * self.batch, *self.chunks)

    @property
    def step_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.batch + sum(tokens for tokens, _ in self.chunks)


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of equal steps. `seconds`: of the device, per step. `elapsed_s`: of the worker, for all steps, including
    preparation. `call_s`: the rest of the call's round trip.
    """

    seconds: tuple[float, ...]
    elapsed_s: float
    call_s: float = 0.0
