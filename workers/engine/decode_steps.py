"""Decode steps in a row of the same sequences, none of which ends: their commits, without building each step.

Nothing but the next tokens changes in such steps: sequences grow, blocks fill up and are cached, new blocks are
allocated. `DecodeSteps` does these in the order in which single steps do them.

Source of the technique: multi-step scheduling, as in vLLM.
"""

from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Items

from workers.engine.blocks import BlockPool
from workers.engine.estimate import StepEstimate
from workers.engine.executor import RunningDecodes
from workers.engine.kv_cache import KVCacheManager
from workers.engine.sequence import Sequence
from workers.kv_events import HASH_BLOCK_SIZE


def num_decode_steps(sequences: Items[Sequence], pool: BlockPool, most: int, *, logs: bool) -> int:
    """For how many steps, from the one in flight on and up to `most`, these decode on. Only the last may end one.

    `logs`: only the last may change the KV event log, either.
    """
    for each in sequences:
        sampling = each.request.sampling
        has_begun = each.first_step_s is not None
        has_output = each.first_token_s is not None or each.decode_called_s is not None
        if each.finish_pending or each.hold or each.borrows or each.in_flight != 1 or not (has_begun and has_output):
            return 0
        if (
            each.num_inflight_tokens != 1
            or each.num_scheduled != len(each.tokens)
            or len(each.tokens) <= each.num_initial_tokens
        ):
            return 0
        if sampling.stop_token_ids or sampling.grammar is not None or sampling.logprobs is not None:
            return 0
        if not each.kv_dtype and each.num_cached_blocks != each.num_computed // pool.block_size:
            return 0
        most = min(most, each.max_length - len(each.tokens))
        if sampling.max_tokens is not None:
            most = min(most, sampling.max_tokens - each.num_output)
        if logs:
            most = min(most, pool.log.hash_block_size - each.num_computed % pool.log.hash_block_size)
    size, free = pool.block_size, pool.num_free - (pool.num_cached if logs else 0)
    while most > 1 and sum([_missing_blocks(each, most, size) for each in sequences]) > free:
        most //= 2
    return most


def _missing_blocks(sequence: Sequence, steps: int, size: int) -> int:
    """Blocks that it lacks for the tokens of `steps` steps."""
    return max(0, (sequence.num_computed + steps - 1) // size + 1 - len(sequence.blocks))


class DecodeSteps:
    """Made by an Engine, used by its MultiStep. `sequences` in the order of the step, which is in flight.

    `num_ended` steps have ended and are committed: blocks are allocated. Of `num_settled`, the tokens and the hashes of
    blocks are there too. Hashes that get into the event log are there at once.
    """

    def __init__(
        self,
        steps: RunningDecodes,
        sequences: Items[Sequence],
        kv: KVCacheManager,
        pool: BlockPool,
        estimate: StepEstimate,
    ) -> None:
        self.steps = steps
        self.sequences = sequences
        self.num_ended = self.num_settled = 0
        self._context_tokens = sum([len(each.tokens) for each in sequences])  # of the step in flight
        self._kv = kv
        self._pool = pool
        self._estimate = estimate
        self._begun_with = [each.num_computed for each in sequences]
        self._events: list[tuple[int, bool, int]] = []  # (steps, whether blocks are full then or a named prefix, index)
        size, num_steps = pool.block_size, len(steps.ends_s)
        for index, (each, computed) in enumerate(zip(sequences, self._begun_with, strict=True)):
            full = range(len(each.blocks) * size - computed, num_steps, size)
            named = range(HASH_BLOCK_SIZE - computed % HASH_BLOCK_SIZE, num_steps, HASH_BLOCK_SIZE)
            self._events += [(end, True, index) for end in full] + [(end, False, index) for end in named]
        self._events.sort(reverse=True)

    def num_ended_by(self, now_s: float) -> int:
        """How many steps have ended by then, without the last one."""
        ends_s = self.steps.ends_s
        return bisect_right(ends_s, now_s, self.num_ended, len(ends_s) - 1)

    def commit(self, ended: int) -> None:
        """The first `ended` steps have ended."""
        first, self.num_ended, batch = self.num_ended, ended, len(self.sequences)
        self._estimate.learn_decodes(batch, self._context_tokens, self.steps.seconds[first:ended])
        self._context_tokens += (ended - first) * batch
        used, num_used, filled = list[int](), self._pool.num_used(), list[int]()
        while self._events and self._events[-1][0] <= ended:
            end, is_full, index = self._events.pop()
            if is_full:
                filled.append(index)
                used += [num_used] * (end - first - len(used))
                num_used += 1
            else:
                self._allocate(filled)
                self._append(index, end)
        self._allocate(filled)
        self._kv.take_missing()  # these are not missing: the sequences do not wait for a loan
        self.steps.observe(first, used + [num_used] * (ended - first - len(used)))

    def _allocate(self, filled: list[int]) -> None:
        """Allocate a block for each of these sequences."""
        if not filled:
            return
        for index, block in zip(filled, self._pool.take(len(filled)), strict=True):
            self.sequences[index].blocks.append(block)
        filled.clear()

    def settle(self) -> list[float]:
        """Append the tokens of all committed steps, and cache the blocks that they filled. Returns when they ended."""
        first, self.num_settled = self.num_settled, self.num_ended
        if first < self.num_ended:
            for index in range(len(self.sequences)):
                self._append(index, self.num_ended)
        return self.steps.ends_s[first : self.num_ended]

    def _append(self, index: int, steps: int) -> None:
        """Append the tokens of the first `steps` steps."""
        sequence, num_computed = self.sequences[index], self._begun_with[index] + steps
        if count := num_computed - sequence.num_computed:
            sequence.tokens += self.steps.sample(sequence.key, len(sequence.tokens), count)
            sequence.num_computed = num_computed
            self._kv.cache_blocks(sequence)

    def commit_last(self, seconds: float) -> Iterator[tuple[Sequence, int]]:
        """The last step has ended and took so long. Yields its sequences, computed and in the cache, with their token.

        Those that were to end with it are not changed otherwise, and get no token.
        """
        self._estimate.learn_decodes(len(self.sequences), self._context_tokens, (seconds,))
        for each in self.sequences:
            each.num_inflight_tokens -= 1
            each.num_computed += 1
            if not each.finish_pending:
                self._kv.cache_blocks(each)
                yield each, self.steps.sample(each.key, len(each.tokens), 1)[0]
