"""What one forward pass computes and what it gives back: the joint between scheduler and device."""

from dataclasses import dataclass

from workers.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the token after a chunk's last position.

    `position` is the absolute position of the drawn token and, with `seed`, the whole state of the generator.
    `history` holds all earlier tokens, only when a penalty needs them. `banned` tokens cannot be drawn
    (end tokens before `min_tokens`).
    """

    params: SamplingParams
    seed: int
    position: int
    history: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's tokens to compute.

    `tokens` stand at positions first_position ...; `blocks` is the block table up to the chunk's end: token at
    position p lives in slot p % block_size of blocks[p // block_size]. A decode is a chunk of one token.
    `draw` None: a chunk in the middle of a prompt, nothing to sample.
    """

    key: str
    tokens: tuple[int, ...]
    first_position: int
    blocks: tuple[int, ...]
    draw: Draw | None

    @property
    def context(self) -> int:
        """Tokens that the chunk's last token attends to, itself included."""
        return self.first_position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. `digest_blocks` are to be digested after it (their KV is then complete).

    Chunks of one token that draw (decodes) come first.
    """

    number: int
    chunks: tuple[Chunk, ...]
    digest_blocks: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[i]` belongs to the i-th chunk (None where nothing was drawn), `logprobs` likewise.

    `digests[rank][j]` belongs to the plan's digest_blocks[j]. `seconds` is the device's time for the step.
    """

    number: int
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    digests: tuple[tuple[int, ...], ...]
    seconds: float
