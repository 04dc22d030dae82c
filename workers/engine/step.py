"""Input and output of one forward pass: the interface between scheduler and executor."""

from msgspec import Struct

from workers.request import SamplingParams, TokenLogprobs


class Draw(Struct, frozen=True, gc=False):
    """How to sample the token after a chunk's last position.

    `position` is the absolute position of the sampled token and, with `seed`, the whole state of the generator. `seen`
    are the distinct tokens so far and `counts` how often the answer has each; both only for penalties, and as bytes of
    an array, which are cheap to copy, compare and send. `banned` tokens are not sampled (end tokens before
    `min_tokens`). `answer` are all tokens of the answer so far, only for a grammar: they are its whole state.
    """

    params: SamplingParams
    seed: int
    position: int
    seen: bytes = b""  # [n] int32
    counts: bytes = b""  # [n] int32
    banned: tuple[int, ...] = ()
    answer: bytes = b""  # [n] int32

    @property
    def adjusts(self) -> bool:
        """Whether the logits are modified before sampling."""
        return bool(self.seen or self.params.logit_bias or self.banned)


ELSEWHERE = -1  # in a block table: another worker holds this block
PENDING = -1  # in a decode's tokens: what the plan before samples for this sequence


class RemoteKV(Struct, frozen=True, gc=False):
    """Leading blocks of a sequence that another worker holds. `lender`: its incarnation; `loan`: its number there."""

    lender: str
    loan: int
    num_blocks: int


class Chunk(Struct, frozen=True, gc=False):
    """A run of one sequence's tokens to compute.

    `tokens` have the positions first_position ...; `blocks` is the block table up to the chunk's end: the token at
    position p is in slot p % block_size of blocks[p // block_size]. A decode is a chunk of one token.
    The blocks of `remote` come first, each a multiple of `SPAN` tokens; in `blocks` they are `ELSEWHERE`.
    `draw` None: a chunk in the middle of a prompt, nothing to sample. `targets` are the prompt tokens that follow the
    chunk's first rows, for prompt log probabilities with the `num_top` best of each row. `adapter`: the id of a loaded
    adapter, or empty. `pooling`: see `SamplingParams`; with `mean`, the rows of targets are summed and not scored.
    """

    key: str
    tokens: tuple[int, ...]
    first_position: int
    blocks: tuple[int, ...]
    draw: Draw | None
    targets: tuple[int, ...] = ()
    num_top: int = 0
    remote: tuple[RemoteKV, ...] = ()
    adapter: str = ""
    pooling: str = ""

    @property
    def num_remote(self) -> int:
        """Leading blocks that other workers hold."""
        return sum(each.num_blocks for each in self.remote)

    @property
    def context(self) -> int:
        """Tokens that the chunk's last token attends to, itself included."""
        return self.first_position + len(self.tokens)


class StepPlan(Struct, frozen=True, gc=False):
    """One iteration: first the copies, in this order, then the chunks, then the digests.

    `swap_out` are pairs (block, host block) to save, `swap_in` pairs (host block, block) to restore, `copies` pairs
    (source block, target block) within the pool. Decodes (chunks of one token with a draw) come first.
    `digest_blocks` are pairs (block, slots that hold tokens) to digest after the step, when their KV is complete.
    """

    number: int
    chunks: tuple[Chunk, ...]
    digest_blocks: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class BrokenStep(Exception):
    """The next step could not be built. `plan` is an empty stand-in for it until `Engine.steps_failed`."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.plan = plan


class StepResult(Struct, frozen=True, gc=False):
    """`tokens[i]` belongs to the i-th chunk, `logprobs` likewise. None: nothing to sample, or logits were not finite.

    `prompt_logprobs[i]` has one entry for each of the i-th chunk's targets (all empty: none requested).
    `pooled[i]` has the sum of the i-th chunk's pooled hidden states, [hidden] float32; empty: there are none.
    `digests[rank][j]` are the cell digests of the plan's digest_blocks[j] on that rank (see `kvtransfer.digest`).
    `seconds` is the device's time for the step, through all stages, without waits for other plans. In the result of one
    rank of a gang, `wait_s` of them were waits for the previous stage's activations, and `comm_s` sums and gathers.
    `lost` are the indices of chunks whose remote KV could not be used; their token is None. So is that of a chunk in
    `stuck`, whose grammar allows no token: pairs (index, why). `forced` are pairs (index, tokens): what must follow the
    chunk's token by its grammar.
    """

    number: int
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    digests: tuple[tuple[bytes, ...], ...]
    seconds: float
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    lost: tuple[int, ...] = ()
    stuck: tuple[tuple[int, str], ...] = ()
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()
    pooled: tuple[tuple[bytes, ...], ...] = ()
    wait_s: float = 0.0
    comm_s: float = 0.0
