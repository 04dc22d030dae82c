"""One attempt at one request inside an engine, and the lease that holds its KV for a reader."""

import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

from workers.engine.blocks import Cached, extend_hashes, hashes_of_prompt
from workers.engine.kv_event_log import Tier
from workers.engine.step import PENDING, Chunk, Draw, RemoteKV
from workers.request import FinishReason, Request, SequenceTiming, TokenLogprobs

INT32 = next(code for code in "il" if array(code).itemsize == 4)


class State(Enum):
    """
    add ──> WAITING ──> RUNNING ──> FINISHED
               ^           │ preempted, its KV dropped
               └───────────┘
    reserve ──> RESERVED ──> RUNNING        (KV fetched, and the tokens sampled elsewhere known)
    """

    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    FINISHED = "finished"


class TokenCounts:
    """The distinct tokens of a sequence and their counts in the answer, for penalties.

    Counts incrementally, so a read costs two copies of the arrays. Owned by a Sequence, which only appends tokens.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._seen = array(INT32)
        self._counts = array(INT32)
        self._num_read = 0

    def read(self, tokens: Items[int], num_prompt: int, *, with_prompt: bool) -> tuple[bytes, bytes]:
        """Distinct tokens and their counts after the prompt, each [n] int32 as bytes, up to the newest token.

        `with_prompt`: include tokens that occur only in the prompt.
        """
        start = max(self._num_read, 0 if with_prompt else num_prompt)
        assert start <= len(tokens), f"{self._num_read} tokens were counted, {len(tokens)} are left"
        for position in range(start, len(tokens)):
            self._counts[self._place(tokens[position])] += position >= num_prompt
        self._num_read = len(tokens)
        return self._seen.tobytes(), self._counts.tobytes()

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._seen))
        if place == len(self._seen):
            self._seen.append(token)
            self._counts.append(0)
        return place


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by its Engine. Tokens at positions below `num_computed` have their KV in `blocks`.

    The next `num_inflight_tokens` are in steps in flight: several chunks of a prompt may be, since steps run in order.
    """

    request: Request
    arrival_s: float
    hold: bool = False  # stop after the first token and keep the KV for a reader
    kv_dtype: str = ""  # of KV that was fetched, if it is not this worker's, or MIXED_KV
    cut_tokens: int = 0  # held: only this many tokens are computed, and none is sampled (0: all of the prompt)
    leased: bool = False  # a lease also holds its blocks
    max_length: int = 0
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_inflight_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    borrows: bool = False  # its leading blocks may move to other workers
    remote: list[RemoteKV] = field(default_factory=list)  # blocks that have moved, from position 0 on
    num_moving: int = 0  # blocks behind these that are being moved
    returning: "SpanReturn | None" = None  # that is being brought back
    moves_from: int = 0  # computed tokens from which on it moves blocks again, after no lender took them
    moved_at: int = 0  # computed tokens at its last move or return
    number: int = 0  # of the prompt in the engine's order of arrival
    was_preempted: bool = False
    from_stores: dict[int, Tier] = field(default_factory=dict)  # numbers of blocks that were read for it, not yet used
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # as far as computed
    pooled: list[bytes] = field(default_factory=list)  # of its chunks, as far as computed
    block_hashes: list[bytes] = field(default_factory=list)
    prefix_hashes: list[int] = field(default_factory=list)  # for `kv_event_log`, as far as computed
    num_cached_blocks: int = 0  # leading blocks already offered to the prefix index
    in_flight: int = 0  # number of steps in flight that use its blocks
    last_step: int = 0  # the newest step that computes some of it
    finish_pending: bool = False  # aborted while in flight: ends when its last step does
    cached_tokens: int = 0
    cached_from: tuple[tuple[str, int], ...] = ()  # (source, tokens); see `CacheHits`
    is_arriving: bool = False  # reserved: its KV is being fetched
    fetched: bool = False
    starts_decoding: bool = False  # starts when its KV has arrived, without a `decode` call
    decode_called_s: float | None = None
    ready_s: float | None = None  # when KV and first token had both arrived
    first_step_s: float | None = None
    first_token_s: float | None = None  # of a prompt computed here
    counts: TokenCounts = field(default_factory=TokenCounts, init=False)  # read if a penalty is set
    key: str = field(init=False)
    num_prompt: int = field(init=False)
    num_forced: int = field(default=0, init=False)  # tokens behind the one that was sampled last
    num_initial_tokens: int = field(init=False)  # the prompt and what earlier attempts generated

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.generated]
        if self.cut_tokens:
            del self.tokens[self.cut_tokens :]
        self.key = self.request.key
        self.num_prompt = len(self.request.prompt)
        self.num_initial_tokens = len(self.tokens)

    @property
    def num_remote(self) -> int:
        """Leading blocks that other workers hold."""
        return sum(each.num_blocks for each in self.remote)

    @property
    def salt(self) -> str:
        """Part of its block hashes: tenant and adapter, and the dtype of fetched KV."""
        salt = self.request.cache_salt
        return f"{salt}\n{self.kv_dtype}" if self.kv_dtype else salt

    def hash_tokens(self, block_size: int) -> None:
        """Hash the full blocks of its tokens that are not hashed yet."""
        full = len(self.tokens) // block_size
        if not self.block_hashes:
            self.block_hashes = [*hashes_of_prompt(self.request.prompt, block_size, self.salt)[:full]]
        if len(self.block_hashes) < full:
            extend_hashes(self.block_hashes, self.tokens, block_size, self.salt, full * block_size)

    @property
    def num_scheduled(self) -> int:
        """Tokens that have their KV once the steps in flight have ended."""
        return self.num_computed + self.num_inflight_tokens

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether each token of the prompt must be computed for what is sent with the first token, and is not yet sent:
        prompt log probabilities, or the mean of the hidden states.
        """
        sampling = self.request.sampling
        return (sampling.prompt_logprobs is not None or sampling.pooling == "mean") and self.num_output == 0

    def begin(self, now_s: float, step: int) -> None:
        """Start a reserved sequence whose KV has arrived. Tokens without KV are computed first.

        The last token is computed in any case, from a multiple of `step` tokens on.
        """
        self.state = State.RUNNING
        self.ready_s = now_s
        most = len(self.tokens) - 1
        if self.num_computed > most:
            self.num_computed = most // step * step
        if self.num_computed < len(self.tokens) - 1:
            self.num_initial_tokens = len(self.tokens)

    def next_due_s(self, tpot_s: float) -> float:
        """When its next token is due, at `tpot_s` per token since decoding began here."""
        began_s = self.first_token_s if self.first_token_s is not None else self.ready_s
        return -math.inf if began_s is None else began_s + (len(self.tokens) - self.num_initial_tokens) * tpot_s

    def timing(self, now_s: float) -> SequenceTiming:
        """See `SequenceTiming`."""
        assert self.first_step_s is not None, "a token came out of a step that never began"
        if self.first_token_s is not None:
            return SequenceTiming(0.0, 0.0, now_s - self.first_token_s)
        began_s = self.arrival_s if self.ready_s is None else self.ready_s
        wait_s = 0.0 if self.decode_called_s is None else began_s - self.decode_called_s
        return SequenceTiming(wait_s, self.first_step_s - began_s, now_s - self.first_step_s)

    def restart(self) -> None:
        """Its KV is lost: compute all tokens again, on this worker."""
        if self.kv_dtype:
            self.kv_dtype, self.block_hashes, self.prefix_hashes = "", [], []
        self.state = State.WAITING
        self.num_computed = self.num_forced = 0
        self.prompt_logprobs.clear()
        self.pooled.clear()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest tokens lack KV: a prompt, or an answer that is recomputed."""
        return self.num_computed < max(len(self.tokens) - 1 - self.num_forced, self.num_initial_tokens)

    @property
    def can_run_ahead(self) -> bool:
        """Whether its next step can be scheduled before the token of the step in flight is known."""
        sampling = self.request.sampling
        return not (self.hold or self.borrows or sampling.has_penalties or sampling.grammar is not None)

    @property
    def max_remaining_tokens(self) -> int:
        """How many more tokens it may generate."""
        most, room = self.request.sampling.max_tokens, self.max_length - len(self.tokens)
        return room if most is None else min(room, most - self.num_output)

    @property
    def ends_next(self) -> bool:
        """Whether the next token is certainly the last one."""
        return self.max_remaining_tokens <= 1

    def draw(self, position: int, end_tokens: tuple[int, ...]) -> Draw:
        """How to sample the token at this position."""
        params = self.request.sampling
        assert params.seed is not None, "the gateway fixes the seed before a request reaches a worker"
        banned: tuple[int, ...] = ()
        if params.min_tokens and position - self.num_prompt < params.min_tokens:
            banned = (*end_tokens, *params.stop_token_ids)
        assert position == len(self.tokens) or self.can_run_ahead, "this draw needs all tokens before"
        answer = b"" if params.grammar is None else array(INT32, self.tokens[self.num_prompt :]).tobytes()
        if not params.has_penalties:
            return Draw(params, params.seed, position, b"", b"", banned, answer)
        seen, counts = self.counts.read(
            self.tokens, len(self.request.prompt), with_prompt=params.repetition_penalty != 1.0
        )
        return Draw(params, params.seed, position, seen, counts, banned, answer)

    def chunk(self, first: int, count: int, block_size: int, end_tokens: tuple[int, ...], now_s: float) -> Chunk:
        """The chunk of positions `first` ... `first + count - 1`, for the step that begins now.

        A single position may be that of the token that the step in flight samples.
        """
        if self.first_step_s is None:
            self.first_step_s = now_s
        stop = first + count
        return Chunk(
            key=self.key,
            tokens=tuple(self.tokens[first:stop]) or (PENDING,),
            first_position=first,
            blocks=tuple(self.blocks[: -(-stop // block_size)]),
            draw=self.draw(stop, end_tokens) if stop >= len(self.tokens) and not self.cut_tokens else None,
            targets=tuple(self.tokens[first + 1 : stop + 1]) if self.wants_prompt_rows else (),
            num_top=self.request.sampling.prompt_logprobs or 0,
            pooling=self.request.sampling.pooling if self.num_output == 0 else "",
            remote=tuple(self.remote),
            adapter=self.request.adapter.id if self.request.adapter else "",
        )

    def finish_reason(self, end_tokens: tuple[int, ...]) -> FinishReason | None:
        """Whether the newest token ends the sequence."""
        params = self.request.sampling
        token = self.tokens[-1]
        if token in params.stop_token_ids:
            return FinishReason.STOP
        if token in end_tokens and not params.ignore_eos:
            return FinishReason.EOS
        if params.max_tokens is not None and self.num_output >= params.max_tokens:
            return FinishReason.LENGTH
        if len(self.tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class SpanReturn:
    """A span of this sequence should come back into `blocks`; without any, it should go to another lender."""

    key: str
    span: RemoteKV
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks of a sequence's first `num_tokens` tokens, held for one reader. Owned by the Engine.

    `digests[i]` are those of block i's cells, on each rank; their number is the ready watermark.
    """

    key: str
    epoch: int
    blocks: tuple[int, ...]
    num_tokens: int
    ttl_s: float
    deadline_s: float
    digests: list[tuple[bytes, ...]] = field(default_factory=list)
    finished: bool = False
    offered: bool = False  # all blocks were computed before: a cached prefix, or of a sequence that continues to run
    num_asked: int = 0  # leading blocks that are digested, or will be by steps in flight
    is_read: bool = False  # the reader of an offer has said which blocks it has
    first_step: int = 0  # the first step that restores or digests blocks of an offer
    restores: dict[int, Cached] = field(default_factory=dict)  # block -> the host block, held, to restore it from
    num_restored: int = 0  # blocks of an offer that were allocated to be restored
    lends: bool = False  # a cached prefix
    num_had: int = 0  # blocks of an offer that its reader has
