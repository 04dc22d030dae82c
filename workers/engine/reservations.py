"""Prompts that another worker computes and this one decodes, from their reservation to their first step here.

    wanted ──grant──> RESERVED, has its blocks ──fetched, decode──> RUNNING
                         └── revoke: prompts have waited too long for these blocks

Pure: time is an argument.
"""

import math
from collections.abc import Sequence as Items

from workers.config import EngineConfig
from workers.engine.blocks import BlockPool
from workers.engine.estimate import StepEstimate
from workers.engine.leases import LeaseManager
from workers.engine.loans import LoanManager
from workers.engine.prefix_fetch import PrefixFetches
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence, State
from workers.engine.sequence_manager import SequenceManager
from workers.engine.slo import slot_refusal
from workers.errors import InvalidRequest, Overloaded, UnknownSequence
from workers.request import MIXED_KV, Request, Reservation, check_prompt

REVOKE_S = 2.0  # that prompts wait for reserved blocks while nothing runs


class Reservations:
    """Owned by an Engine, whose `sequences` it shares: those in state RESERVED are its own."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        scheduler: Scheduler,
        leases: LeaseManager,
        loans: LoanManager,
        prefix_fetches: PrefixFetches,
        estimate: StepEstimate,
        sequences: SequenceManager,
        *,
        max_length: int,
        vocab_size: int,
        depth: int,
    ) -> None:
        self._config = config
        self._pool = pool
        self._scheduler = scheduler
        self._leases = leases
        self._loans = loans
        self._prefix_fetches = prefix_fetches
        self._estimate = estimate
        self._sequences = sequences
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._depth = depth
        self._staging = min(config.staging_blocks or max(1, pool.num_blocks // 2), pool.num_blocks)
        self._starved_s = math.inf  # since when prompts wait for blocks while nothing runs

    def _reserved(self) -> list[Sequence]:
        return [each for each in self._sequences if each.state is State.RESERVED]

    # ---- a prompt gets its blocks --------------------------------------------------------------------------------

    def reserve(self, request: Request, asked_s: float) -> Reservation:
        """`wanted` and `grant` in one call. Raises `InvalidRequest` or `Overloaded`."""
        return self.grant(self.wanted(request, asked_s))

    def wanted(self, request: Request, asked_s: float) -> Sequence:
        """A sequence for a prompt that another worker computes; pass it to `grant` until that succeeds.

        Its blocks are hashed here, once. Blocks needed by prompts that arrived before `asked_s` are not given to it.
        Raises `InvalidRequest`.
        """
        self._sequences.refuse_known(request)
        check_prompt(request, self._max_length, self._vocab_size)
        sequence = Sequence(request, asked_s, max_length=self._max_length, state=State.RESERVED)
        if request.kv_dtype != self._config.dtype:
            sequence.kv_dtype = request.kv_dtype
        if sequence.kv_dtype != MIXED_KV:
            sequence.hash_tokens(self._pool.block_size)
        return sequence

    def grant(self, sequence: Sequence) -> Reservation:
        """Reserve blocks for a wanted prompt. Raises `Overloaded`, or `InvalidRequest` if its key is in use by now."""
        request = sequence.request
        self._sequences.refuse_known(request)
        if refusal := self._refusal(sequence):
            raise Overloaded(refusal, retry_after_s=0.1)
        self._sequences.add(sequence)
        return Reservation(request.key, len(sequence.blocks), sequence.cached_tokens)

    def _refusal(self, sequence: Sequence) -> str:
        """Why there is no room for a wanted prompt; empty: it now has its blocks."""
        request, queues = sequence.request, self._scheduler.queues
        if self.waits_for_sibling(request):
            return f"the KV of a sibling of {request.key} is being transferred; it will be shared"
        reserved = self._reserved()
        total = -(-request.num_tokens // self._pool.block_size)
        staged = sum(len(each.blocks) for each in reserved)
        # One prompt of any size may always be staged: the budget limits concurrency, not length.
        if staged and staged + total > self._staging:
            return f"{staged} of {self._staging} staging blocks are reserved"
        earlier = [each for each in queues.waiting if each.arrival_s < sequence.arrival_s]
        if len(queues.running) + len(reserved) + len(earlier) >= self._config.max_running:
            return f"all {self._config.max_running} decode slots are taken or waited for"
        decoding = reserved + [each for each in queues.running if not each.hold]
        if refusal := slot_refusal(self._estimate, decoding, request, self._depth):
            return refusal
        if request.fresh:
            self._pool.forget(sequence.block_hashes)
        kept = sum(-(-len(each.tokens) // self._pool.block_size) for each in earlier)
        if not self._scheduler.kv.reserve(sequence, self._prefix_fetches.known(sequence.block_hashes), kept):
            return f"{total} blocks wanted, {self._pool.num_free} free, {kept} kept for prompts that arrived earlier"
        return ""

    def waits_for_sibling(self, request: Request) -> bool:
        """Whether a sibling's transfer will bring more than the last block of the KV that this request would fetch."""
        return any(
            each.state is State.RESERVED
            and not each.fetched
            and each.request.is_sibling(request)
            and request.num_tokens - each.cached_tokens > self._pool.block_size
            for each in self._sequences
        )

    # ---- its KV and its first token arrive -----------------------------------------------------------------------

    def get(self, key: str) -> Sequence:
        """The reserved sequence of this key. Raises `UnknownSequence`."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.state is not State.RESERVED:
            raise UnknownSequence(f"{key} holds no reservation here; it ended or the worker restarted")
        return sequence

    def begin_fetch(self, key: str) -> None:
        """The KV of this reservation begins to arrive. Raises `UnknownSequence`."""
        self.get(key).is_arriving = True

    def fetched(self, key: str, now_s: float, *, num_tokens: int | None = None, starts_decoding: bool = False) -> None:
        """The KV of the first `num_tokens` tokens (None: the whole prompt) is in the reserved blocks, verified.

        `starts_decoding`: compute the rest and sample without `decode`, because no token was sampled elsewhere.
        """
        sequence = self.get(key)
        arrived = sequence.request.num_tokens if num_tokens is None else num_tokens
        sequence.num_computed = max(arrived, sequence.cached_tokens)
        self._scheduler.kv.cache_blocks(sequence)
        sequence.fetched = True
        sequence.starts_decoding = starts_decoding
        self._start_if_ready(sequence, now_s)

    def decode(self, key: str, tokens: Items[int], now_s: float) -> None:
        """Decode after these tokens, generated elsewhere, once the KV is here. Missing KV is computed first."""
        sequence = self.get(key)
        if sequence.decode_called_s is not None:
            raise InvalidRequest("request.id", f"{key} is already decoding")
        if len(sequence.tokens) + len(tokens) > self._max_length:
            raise InvalidRequest("tokens", f"{key} would be longer than the {self._max_length} tokens of this worker")
        sequence.tokens += tokens
        sequence.decode_called_s = now_s
        self._start_if_ready(sequence, now_s)

    def _start_if_ready(self, sequence: Sequence, now_s: float) -> None:
        if sequence.fetched and (sequence.starts_decoding or sequence.decode_called_s is not None):
            sequence.begin(now_s, self._pool.block_size if self._pool.has_state else 1)
            self._scheduler.queues.running.append(sequence)

    # ---- or it loses its blocks again ----------------------------------------------------------------------------

    @property
    def wakes_at_s(self) -> float:
        """When `revoke` may end some."""
        return self._starved_s + REVOKE_S

    def revoke(self, missing: int, now_s: float) -> bool:
        """End reservations if prompts have waited for their blocks for `REVOKE_S` while nothing ran. Whether any ended.

        Their own prompts have not begun elsewhere, perhaps because they wait for blocks that another worker reserved
        for the prompts that wait here. Of the fewest attempts first, so that no request loses all of its own.
        """
        missing -= self._loans.num_blocks
        if missing <= 0 or self._scheduler.queues.running or self._scheduler.num_in_flight or len(self._leases):
            self._starved_s = math.inf
            return False
        self._starved_s = min(self._starved_s, now_s)
        if now_s < self._starved_s + REVOKE_S:
            return False
        self._starved_s = now_s
        reserved = [each for each in self._reserved() if not each.is_arriving]
        if missing > sum(len(each.blocks) for each in reserved):
            return False
        wanted = self._pool.num_free + missing
        for each in sorted(reserved, key=lambda each: (each.request.attempt, -each.arrival_s)):
            if self._pool.num_free < wanted:
                why = f"its reservation was revoked: prompts waited {REVOKE_S:g} s for its blocks"
                self._sequences.fail(each.key, why)
        return True
