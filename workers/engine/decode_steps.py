"""Decode steps in a row of the same sequences, none of which ends: their commits, without building each step.

Nothing but the next tokens changes in such steps: sequences grow, blocks fill up and are cached, new blocks are
allocated. `DecodeSteps` does these in the order in which single steps do them. Pure.

Source of the technique: multi-step scheduling, as in vLLM.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

from workers.engine.blocks import BlockPool
from workers.engine.estimate import StepEstimate
from workers.engine.kv_cache import KVCacheManager
from workers.engine.sequence import Sequence
from workers.kv_events import HASH_BLOCK_SIZE

Sample = Callable[[str, int, int], Items[int]]
"""The tokens of this sequence from this position on, so many. None of them is an end token."""


def num_decode_steps(sequences: Items[Sequence], pool: BlockPool, most: int, *, logs: bool) -> int:
    """For how many steps, from the one in flight on and up to `most`, these decode on. Only the last may end one.

    `logs`: only the last may change the KV event log, either.
    """
    for each in sequences:
        sampling = each.request.sampling
        begun = each.first_step_s is not None
        told = each.first_token_s is not None or each.decode_called_s is not None
        if each.finish_pending or each.hold or each.borrows or each.in_flight != 1 or not (begun and told):
            return 0
        if each.num_ordered != 1 or each.num_scheduled != len(each.tokens) or len(each.tokens) <= each.num_given:
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
    while most > 1 and sum(_missing_blocks(each, most, size) for each in sequences) > free:
        most //= 2
    return most


def _missing_blocks(sequence: Sequence, steps: int, size: int) -> int:
    """Blocks that it lacks for the tokens of so many steps."""
    return max(0, (sequence.num_computed + steps - 1) // size + 1 - len(sequence.blocks))


class DecodeSteps:
    """Made by an Engine, used by its MultiStep. `sequences` in the order of the step, which is in flight.

    Blocks are allocated with each commit. Tokens and hashes of blocks follow in `settle`; hashes that get into the
    event log at once.
    """

    def __init__(
        self,
        sequences: Items[Sequence],
        kv: KVCacheManager,
        pool: BlockPool,
        estimate: StepEstimate,
        sample: Sample,
    ) -> None:
        self.sequences = sequences
        self._context_tokens = sum([len(each.tokens) for each in sequences])  # of the step in flight
        self._kv = kv
        self._pool = pool
        self._estimate = estimate
        self._sample = sample
        self._ended = 0
        self._begun_with = [each.num_computed for each in sequences]
        self._filled_after: dict[int, list[int]] = {}  # these many steps, modulo the block size: indices
        for index, computed in enumerate(self._begun_with):
            self._filled_after.setdefault(-computed % pool.block_size, []).append(index)
        self._uncached: dict[int, None] = {}  # indices of those with full blocks that are not cached yet
        self._stops = sorted(self._filled_after)
        self.num_until_filled = self._steps_to_filled()  # more steps, and then new blocks are allocated

    def _steps_to_filled(self) -> int:
        """After how many more steps the next blocks are full."""
        place = self._ended % self._pool.block_size
        index = bisect_right(self._stops, place)
        return (self._stops[index] if index < len(self._stops) else self._stops[0] + self._pool.block_size) - place

    def commit(self, seconds: Items[float]) -> None:
        """The step in flight and those behind it, at most `num_until_filled`, have ended: each took so long."""
        count, batch = len(seconds), len(self.sequences)
        self._estimate.learn_decodes(batch, self._context_tokens, seconds)
        self._context_tokens += count * batch
        self._ended += count
        self.num_until_filled -= count
        if not self.num_until_filled:
            self.num_until_filled = self._steps_to_filled()
            self._fill()
        self._kv.take_missing()  # no loan could give it

    def _fill(self) -> None:
        """Blocks are full."""
        pool, size = self._pool, self._pool.block_size
        filled = self._filled_after[self._ended % size]
        for index in filled:
            self._uncached[index] = None
            if (self._begun_with[index] + self._ended) % HASH_BLOCK_SIZE == 0:
                self._append(index)
        for index in filled:
            each = self.sequences[index]
            if self._begun_with[index] + self._ended == len(each.blocks) * size:
                each.blocks += pool.allocate(1)

    def settle(self, *, blocks_only: bool = False) -> None:
        """Append the tokens of the steps that have ended, and cache the blocks that they filled.

        `blocks_only`: not the tokens of sequences without such blocks.
        """
        for index in tuple(self._uncached) if blocks_only else range(len(self.sequences)):
            self._append(index)

    def _append(self, index: int) -> None:
        sequence, num_computed = self.sequences[index], self._begun_with[index] + self._ended
        self._uncached.pop(index, None)
        if count := num_computed - sequence.num_computed:
            sequence.tokens += self._sample(sequence.key, len(sequence.tokens), count)
            sequence.num_computed = num_computed
            if num_computed >= (sequence.num_cached_blocks + 1) * self._pool.block_size:
                self._kv.cache_blocks(sequence)

    def commit_last(self, seconds: float) -> Iterator[tuple[Sequence, int]]:
        """The last step has ended and took so long. Yields its sequences, computed and in the cache, with their token.

        Those that were to end with it are not changed otherwise, and get no token.
        """
        self._estimate.learn_decodes(len(self.sequences), self._context_tokens, (seconds,))
        for each in self.sequences:
            each.num_ordered -= 1
            each.num_computed += 1
            if not each.finish_pending:
                if each.num_computed >= (each.num_cached_blocks + 1) * self._pool.block_size or each.request.group:
                    self._kv.cache_blocks(each)
                yield each, self._sample(each.key, len(each.tokens), 1)[0]
