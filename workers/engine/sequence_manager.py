"""The sequences of one engine: what steps compute for them, how they end, and their outputs until they are taken.

Knows their blocks and leases. Pure: time is an argument.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

from workers.engine.blocks import BlockPool
from workers.engine.borrowing import BlockMove
from workers.engine.leases import Digests, LeaseManager
from workers.engine.prefetch import Prefetcher
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Lease, Sequence, State
from workers.engine.step import StepPlan, StepResult
from workers.errors import InvalidRequest, UnknownSequence
from workers.request import FailedOut, HeadOut, Request, TokenLogprobs, TokensOut

logger = logging.getLogger(__name__)

EngineOutput = TokensOut | HeadOut | FailedOut | Lease  # a Lease: a held prompt has its blocks, so its reader may start


class SequenceManager:
    """Owned by an Engine. `outputs`: since they were taken last, in order. `dtype`: of the KV. `non_finite`: how many
    ended because their logits were not finite.
    """

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        leases: LeaseManager,
        prefetcher: Prefetcher,
        end_tokens: tuple[int, ...],
        dtype: str,
    ) -> None:
        self.outputs: list[EngineOutput] = []
        self.non_finite = 0
        self._pool = pool
        self._scheduler = scheduler
        self._leases = leases
        self._prefetcher = prefetcher
        self._end_tokens = end_tokens
        self._dtype = dtype
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, key: str) -> bool:
        return key in self._sequences

    def __getitem__(self, key: str) -> Sequence:
        return self._sequences[key]

    def get(self, key: str) -> Sequence | None:
        return self._sequences.get(key)

    def refuse_known(self, request: Request) -> None:
        """Raise `InvalidRequest` if a sequence of this key is here."""
        if request.key in self._sequences:
            raise InvalidRequest("request.id", f"{request.key!r} is already running here")

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence

    def take_outputs(self) -> list[EngineOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def offer_migration(self, key: str, most_tokens: int, now_s: float) -> Lease | None:
        """Lease the full blocks of a running sequence's first `most_tokens` tokens to the target of its migration.

        It continues here until it is aborted, whatever happens to the lease. None: there is no full block, so the
        target must compute everything. Raises `UnknownSequence`.
        """
        sequence = self._sequences.get(key)
        if sequence is None or sequence.finish_pending or sequence.hold or sequence.state is State.RESERVED:
            raise UnknownSequence(f"{key} does not decode here; it ended or has not started")
        if sequence.state is not State.RUNNING or sequence.remote:
            return None
        blocks = sequence.blocks[: min(sequence.num_computed, most_tokens) // self._pool.block_size]
        return self._leases.offer_held(key, blocks, now_s) if blocks else None

    def offer_move(self, move: BlockMove, now_s: float) -> Lease:
        """Lease the blocks of this move to a lender. Raises `UnknownSequence`."""
        sequence = self._sequences.get(move.key)
        if sequence is None or (sequence.num_remote, sequence.num_moving) != (move.first, move.count):
            raise UnknownSequence(f"{move.key} does not move blocks; it ended or was preempted")
        blocks = sequence.blocks[move.first : move.first + move.count]
        return self._leases.offer_held(f"{move.key}:move", blocks, now_s)

    def move_failed(self, move: BlockMove, reason: str) -> None:
        """No lender took them: the sequence fails if it needs their memory."""
        self._leases.drop(f"{move.key}:move")
        if self._scheduler.kv.borrowed.move_failed(move):
            self.fail(move.key, reason, no_memory=True)

    def abort(self, key: str) -> bool:
        """End a sequence and the lease of its KV, without further outputs; False when there is neither."""
        leased = self._leases.drop(key)
        sequence = self._sequences.get(key)
        if sequence is None or sequence.finish_pending:
            return leased
        self.end(sequence)
        return True

    def end(self, sequence: Sequence) -> None:
        """End a sequence: at once, or when its last step in flight has ended."""
        if sequence.in_flight:
            sequence.finish_pending = True
            return
        self._scheduler.remove(sequence)
        self._prefetcher.end(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.key]

    def fail(self, key: str, reason: str, **flags: bool) -> None:
        """Abort, and report the reason to the subscriber. For the flags, see `FailedOut`."""
        if key in self._sequences:
            self.outputs.append(FailedOut(key, reason, **flags))
        self.abort(key)

    def fail_on_error(self, sequence: Sequence, error: Exception) -> None:
        """An error in work for one sequence ends that sequence only."""
        logger.error("%s failed with an unexpected error", sequence.key, exc_info=error)
        self.fail(sequence.key, f"unexpected {type(error).__name__}: {error}")

    # ---- what steps compute --------------------------------------------------------------------------------------

    def process(self, plan: StepPlan, result: StepResult, digests: Digests, now_s: float) -> None:
        """Apply the result of a step."""
        sequences, block_size = self._sequences, self._pool.block_size
        scored = result.prompt_logprobs or ((),) * len(plan.chunks)
        pooled = result.pooled or ((),) * len(plan.chunks)
        stuck, forced = dict(result.stuck), dict(result.forced)
        each_chunk = zip(plan.chunks, result.tokens, result.logprobs, scored, strict=True)
        for index, (chunk, token, logprobs, prompt) in enumerate(each_chunk):
            sequence = sequences[chunk.key]
            num_tokens = len(chunk.tokens)
            sequence.num_inflight_tokens -= num_tokens
            sequence.num_computed = chunk.first_position + num_tokens
            if sequence.finish_pending:
                continue
            try:
                missing = (chunk.draw is not None and token is None) or index in result.lost
                if missing or not all(math.isfinite(each.chosen) for each in prompt):
                    self._fail_not_computed(sequence, index in result.lost, stuck.get(index, ""))
                    continue
                if prompt:
                    sequence.prompt_logprobs += prompt
                sequence.pooled += pooled[index]
                if sequence.num_computed >= (sequence.num_cached_blocks + 1) * block_size or sequence.request.group:
                    self._scheduler.kv.cache_blocks(sequence)
                if len(self._leases):
                    self._leases.advance(sequence, digests)
                if token is not None:
                    self._append(sequence, (token, *forced.get(index, ())), logprobs, now_s)
                elif sequence.cut_tokens == sequence.num_computed:
                    cached = sequence.cached_tokens, sequence.cached_from
                    self.outputs.append(HeadOut(sequence.key, sequence.timing(now_s), *cached))
                    self._end_held(sequence)
            except Exception as error:
                self.fail_on_error(sequence, error)

    def process_decodes(self, decoded: Iterable[tuple[Sequence, int]], now_s: float, *, deferred: bool) -> None:
        """Apply the result of a step that only decoded, without log probabilities: each sequence's token.

        `deferred`: without outputs for sequences that go on.
        """
        for sequence, token in decoded:
            if len(self._leases):
                self._leases.advance(sequence, {})
            if deferred and not sequence.ends_next:
                sequence.tokens.append(token)
            else:
                self._append(sequence, (token,), None, now_s)

    def _append(self, sequence: Sequence, tokens: Items[int], logprobs: TokenLogprobs | None, now_s: float) -> None:
        """Append tokens up to the one that ends the answer; only the first one if the sequence is held for a reader."""
        for count, token in enumerate(tokens):
            sequence.num_forced = count
            if self._append_one(sequence, token, logprobs, now_s) or sequence.hold:
                break

    def _append_one(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now_s: float) -> bool:
        """Append a token. Returns whether it ends the answer."""
        sequence.tokens.append(token)
        finish = sequence.finish_reason(self._end_tokens)
        first = sequence.decode_called_s is None and sequence.first_token_s is None
        self.outputs.append(
            TokensOut(
                key=sequence.key,
                first_position=sequence.num_output - 1,
                tokens=(token,),
                timing=sequence.timing(now_s),
                logprobs=(logprobs,) if logprobs is not None else (),
                finish=finish,
                prefilled=first,
                cached_tokens=sequence.cached_tokens,
                cached_from=sequence.cached_from if first else (),
                prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
                pooled=tuple(sequence.pooled) if first else (),
            )
        )
        if first:
            sequence.first_token_s = now_s
        if sequence.hold:
            self._end_held(sequence)
        elif finish is not None:
            self._leases.drop(sequence.key)  # its reader has nothing left to fetch
            self.end(sequence)
        return finish is not None

    def _end_held(self, sequence: Sequence) -> None:
        self._leases.finish(sequence.key)
        self.end(sequence)

    def _fail_not_computed(self, sequence: Sequence, is_lost: bool, stuck: str) -> None:
        """Fail a sequence for which no token can be sampled. If the logits are not finite, its KV is not reused."""
        key, fail = sequence.key, self.fail
        if stuck:
            return fail(key, f"its grammar allows no token: {stuck}", final=True)
        if is_lost:
            return fail(key, "KV on another worker is lost: it ended, or did not answer in time")
        self.non_finite += 1
        self._pool.forget(sequence.block_hashes)
        where = f"behind token {sequence.num_computed}"
        why = f"the model's logits are not finite {where}; the weights, or KV in {self._dtype}, may be the cause"
        fail(key, why, final=True)

    def check(self) -> None:
        """Prove that each sequence is in the queue of its state. Raises AssertionError."""
        queued = [*self._scheduler.queues.waiting, *self._scheduler.queues.running]
        assert all(self._sequences[s.key] is s for s in queued), "a queue holds a sequence that ended"
        assert len(queued) == sum(s.state is not State.RESERVED for s in self)
