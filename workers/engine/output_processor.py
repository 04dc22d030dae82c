"""Applies what a step has computed to its sequences.

Knows sequences, their blocks and their leases; knows no queue. Pure: time is an argument.
"""

import math
from collections.abc import Sequence as Items

from workers.engine.blocks import BlockPool
from workers.engine.kv_cache import KVCacheManager
from workers.engine.leases import Digests, LeaseBook
from workers.engine.sequence import Sequence
from workers.engine.sequence_book import SequenceBook
from workers.engine.step import StepPlan, StepResult
from workers.request import HeadOut, TokenLogprobs, TokensOut


class OutputProcessor:
    """Owned by an Engine. `dtype`: of the KV. `non_finite`: steps of sequences whose logits were not finite."""

    def __init__(
        self,
        sequences: SequenceBook,
        pool: BlockPool,
        kv: KVCacheManager,
        leases: LeaseBook,
        end_tokens: tuple[int, ...],
        dtype: str,
    ) -> None:
        self.non_finite = 0
        self._sequences = sequences
        self._pool = pool
        self._kv = kv
        self._leases = leases
        self._end_tokens = end_tokens
        self._dtype = dtype

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
            sequence.num_ordered -= num_tokens
            sequence.num_computed = chunk.first_position + num_tokens
            if index in result.late:
                sequence.num_computed -= 1
            if sequence.finish_pending or index in result.late:
                continue
            try:
                missing = (chunk.draw is not None and token is None) or index in result.lost
                if missing or not all(math.isfinite(each.chosen) for each in prompt):
                    self._fail_not_computed(sequence, index in result.lost, stuck.get(index, ""))
                    continue
                if prompt:
                    sequence.prompt_logprobs += prompt
                sequence.pooled += pooled[index]
                if sequence.num_computed >= (sequence.num_named + 1) * block_size or sequence.request.group:
                    self._kv.name_blocks(sequence)
                if len(self._leases):
                    self._leases.advance(sequence, digests)
                if token is not None:
                    self._append(sequence, (token, *forced.get(index, ())), logprobs, now_s)
                elif sequence.cut_tokens == sequence.num_computed:
                    cached = sequence.cached_tokens, sequence.cached_from
                    sequences.outputs.append(HeadOut(sequence.key, sequence.timing(now_s), *cached))
                    self._end_held(sequence)
            except Exception as error:
                sequences.fail_on_error(sequence, error)

    def _append(self, sequence: Sequence, tokens: Items[int], logprobs: TokenLogprobs | None, now_s: float) -> None:
        """Up to the token that ends the answer. Only the first one is of a sequence that is held for a reader."""
        for count, token in enumerate(tokens):
            sequence.num_forced = count
            if self._append_one(sequence, token, logprobs, now_s) or sequence.hold:
                break

    def _append_one(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now_s: float) -> bool:
        """Whether it ends the answer."""
        sequence.tokens.append(token)
        finish = sequence.finish_reason(self._end_tokens)
        first = sequence.decode_called_s is None and sequence.first_token_s is None
        self._sequences.outputs.append(
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
            self._sequences.end(sequence)
        return finish is not None

    def _end_held(self, sequence: Sequence) -> None:
        self._leases.finish(sequence.key)
        self._sequences.end(sequence)

    def _fail_not_computed(self, sequence: Sequence, is_lost: bool, stuck: str) -> None:
        """No token can be sampled. If that is the model's fault, no other sequence may use this KV."""
        key, fail = sequence.key, self._sequences.fail
        if stuck:
            return fail(key, f"its grammar allows no token: {stuck}", final=True)
        if is_lost:
            return fail(key, "KV on another worker is lost: it ended, or did not answer in time")
        self.non_finite += 1
        self._pool.forget(sequence.hashes)
        where = f"behind token {sequence.num_computed}"
        why = f"the model's logits are not finite {where}; the weights, or KV in {self._dtype}, may be the cause"
        fail(key, why, final=True)
