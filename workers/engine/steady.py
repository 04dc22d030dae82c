"""Steps in a row that decode the same sequences, none of which ends: their commits, without building each step.

Nothing but the next tokens changes in such steps: sequences grow, blocks fill up and are named, new blocks are
allocated, and the estimate learns. `SteadyDecodes` does these in the order in which single steps do them. Pure.

Source of the name of the technique: multi-step scheduling, as in vLLM.
"""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items

from workers.engine.blocks import BlockPool
from workers.engine.kv_cache import KVCacheManager
from workers.engine.sequence import Sequence
from workers.request import TokensOut

Sample = Callable[[str, int, int], Items[int]]
"""The tokens of this sequence from this position on, so many. None of them is an end token."""


def num_alike(sequences: Items[Sequence], pool: BlockPool, most: int) -> int:
    """How many steps of these decodes are alike, from the one in flight on, up to `most`. Only the last may end one."""
    for each in sequences:
        sampling = each.request.sampling
        begun = each.first_step_s is not None
        told = each.first_token_s is not None or each.decode_called_s is not None
        if each.doomed or each.hold or each.borrows or each.in_flight != 1 or not (begun and told):
            return 0
        if each.num_ordered != 1 or each.num_scheduled != len(each.tokens) or len(each.tokens) <= each.num_given:
            return 0
        if sampling.stop_token_ids or sampling.grammar is not None or sampling.logprobs is not None:
            return 0
        if not each.kv_dtype and each.num_named != each.num_computed // pool.block_size:
            return 0
        most = min(most, each.max_length - len(each.tokens))
        if sampling.max_tokens is not None:
            most = min(most, sampling.max_tokens - each.num_output)
    size, free = pool.block_size, pool.num_free
    while most > 1 and sum(_missing_blocks(each, most, size) for each in sequences) > free:
        most //= 2
    return most


def _missing_blocks(sequence: Sequence, steps: int, size: int) -> int:
    """Blocks that it lacks for the tokens of so many steps."""
    return max(0, (sequence.num_computed + steps - 1) // size + 1 - len(sequence.blocks))


class SteadyDecodes:
    """Owned by an Engine while such steps run. `sequences` in the order of the step, which is in flight."""

    def __init__(self, sequences: Items[Sequence], kv: KVCacheManager, pool: BlockPool, sample: Sample) -> None:
        self.sequences = sequences
        self.batch = len(sequences)
        self.context_tokens = sum(len(each.tokens) for each in sequences)  # of the step in flight
        self._kv = kv
        self._pool = pool
        self._sample = sample
        self._ended = 0
        self._begun_with = {each: each.num_computed for each in sequences}
        self._sent = 0  # steps whose tokens `outputs` has returned
        self._by_phase: dict[int, list[Sequence]] = defaultdict(list)  # when their blocks are full
        for each in sequences:
            self._by_phase[-each.num_computed % pool.block_size].append(each)

    def next(self) -> None:
        """The step in flight has ended and the next one begins."""
        self._ended += 1
        self.context_tokens += self.batch
        full = self._by_phase.get(self._ended % self._pool.block_size)
        if full is None:
            return
        for each in full:
            self._fill(each)
            self._kv.name_blocks(each)
        for each in full:
            if each.num_computed == len(each.blocks) * self._pool.block_size:
                each.blocks += self._pool.allocate(1)

    def _fill(self, sequence: Sequence) -> None:
        """Append the tokens of the steps that have ended."""
        count = self._begun_with[sequence] + self._ended - sequence.num_computed
        if count:
            sequence.tokens += self._sample(sequence.key, len(sequence.tokens), count)
            sequence.num_computed += count

    def outputs(self, ends_s: Items[float]) -> list[TokensOut]:
        """What was sampled since the last call. `ends_s`: of all steps that have ended."""
        count, self._sent = self._ended - self._sent, self._ended
        if not count:
            return []
        for each in self.sequences:
            self._fill(each)
        times_s = tuple(ends_s[-count:])
        return [
            TokensOut(
                key=each.key,
                first_position=each.num_output - count,
                tokens=tuple(each.tokens[-count:]),
                timing=each.timing(times_s[-1]),
                cached_tokens=each.cached_tokens,
                token_s=times_s,
            )
            for each in self.sequences
        ]
