"""Allocates blocks to sequences, and plans the copies this takes.

Cached prefixes are shared, tails of siblings copied. A preempted sequence gives up all its blocks; what is no longer
cached when it returns is recomputed. Knows sequences; knows no queue order and no step. Pure.

Source of preemption by recomputation, all or nothing: Kwon et al., vLLM (SOSP'23).
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items

from workers.config import EngineConfig
from workers.engine.blocks import BlockPool, extend_hashes, tail_hash
from workers.engine.borrowing import BorrowedBlocks
from workers.engine.cache_hits import DEVICE, FETCHED
from workers.engine.estimate import StepEstimate
from workers.engine.host_tier import HostTier, StepCopies
from workers.engine.kv_event_log import Tier
from workers.engine.sequence import Sequence, State
from workers.kv_events import HASH_BLOCK_SIZE, prefix_hashes, prefix_hashes_of_blocks, prefix_hashes_of_prompt
from workers.request import MIXED_KV


class KVCacheManager:
    """Owned by a Scheduler, whose list of `running` sequences it reads.

    `reserves_answer`: a sequence is admitted only if its longest possible answer fits too.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        estimate: StepEstimate,
        running: Items[Sequence],
        *,
        reserves_answer: bool,
    ) -> None:
        self._step_blocks = -(-config.max_batch_tokens // config.block_size)
        self.tier = HostTier(pool, estimate, self._step_blocks)
        self.borrowed = BorrowedBlocks(pool, min(2 * self._step_blocks, pool.num_blocks // 2))
        self.block_size = pool.block_size
        self._pool = pool
        self._estimate = estimate
        self._running = running
        self._reserves_answer = reserves_answer
        self._missing = 0

    def take_missing(self) -> int:
        """How many blocks were not free for a sequence that needed them, since the last call."""
        missing, self._missing = self._missing, 0
        return missing

    @property
    def has_free_block(self) -> bool:
        return self._pool.num_free > 0

    def fits(self, sequence: Sequence, *, held: int, wanted: int, kept: int = 0) -> bool:
        """Whether `wanted` more blocks are free for a sequence that would then hold `held` + `wanted`, and `kept` more.

        One block for each running sequence stays free, so that letting one in does not preempt another at once; under a
        policy that reserves answers, as many as the longest ones take.
        """
        if self._reserves_answer and not sequence.borrows:
            spare = sum(max(0, self._longest(each) - len(each.blocks)) for each in self._running)
            wanted = max(wanted, self._longest(sequence) - held)
        else:
            spare = 0 if sequence.hold else len(self._running)
        missing = wanted + spare + kept - self._pool.num_free
        self._missing = max(self._missing, missing)
        return missing <= 0

    def _longest(self, sequence: Sequence) -> int:
        """Blocks of the sequence with its longest possible answer."""
        num_tokens = len(sequence.tokens)
        if not sequence.hold:
            most = sequence.request.sampling.max_tokens
            num_tokens = sequence.max_length if most is None else len(sequence.request.prompt) + most
        return -(-min(num_tokens, sequence.max_length) // self._pool.block_size)

    def leaves(self, sequence: Sequence, others: Items[Sequence]) -> bool:
        """Whether the others would still fit beside this prompt, even if nothing of them is cached."""
        num_blocks = sum(-(-len(each.tokens) // self._pool.block_size) for each in (sequence, *others))
        return not self._reserves_answer and num_blocks + len(self._running) < self._pool.num_free

    def num_ready(self, sequence: Sequence) -> int:
        """How many of the prompt's tokens are on the device."""
        size = self._pool.block_size
        sequence.hash_tokens(size)
        return size * self._pool.num_known(sequence.block_hashes[: (len(sequence.tokens) - 1) // size])

    # ---- a sequence comes --------------------------------------------------------------------------------------

    def place(self, sequence: Sequence, copies: StepCopies) -> bool:
        """Blocks for all tokens the sequence has, known prefixes shared. False: they are not free.

        A shared tail is copied at once: a lease of these blocks must name the one that will be written.
        """
        size = self._pool.block_size
        sequence.hash_tokens(size)
        if sequence.request.fresh:
            self._pool.forget(sequence.block_hashes)
        for share_tail in (True, False) if sequence.request.group else (False,):
            shared, computed = self._known(sequence, share_tail=share_tail and not sequence.borrows)
            tail = shared[computed // size :]
            num_kept = len(shared) - len(tail)
            num_blocks = -(-len(sequence.tokens) // size) - num_kept
            if sequence.borrows:  # with less than a span it could move none, and older sequences would preempt it
                least = max(self._step_blocks, self.borrowed.span + self._step_blocks - num_kept)
                num_blocks = min(num_blocks, least, self._pool.num_blocks - num_kept)
            if self.fits(sequence, held=num_kept, wanted=num_blocks):
                sequence.blocks = shared[:num_kept] + self._pool.allocate(num_blocks, copies.evicted)
                copies.copy(tail, sequence.blocks[num_kept:][: len(tail)])
                sequence.num_computed = sequence.cached_tokens = computed
                sequence.num_cached_blocks = computed // size
                fetched = size * self._pool.use_fetched(shared)
                sequence.cached_from = ()
                self._pool.hits.looked_up(len(sequence.tokens), ())
                self._count(sequence, {DEVICE: computed - fetched, FETCHED: fetched}, 0)
                if not tail and not sequence.borrows:
                    self.restore(sequence, copies)
                return True
            self._pool.free(shared)
        return False

    def restore(self, sequence: Sequence, copies: StepCopies) -> None:
        """Take what the device has behind a prompt's scheduled tokens, and restore what host memory has behind that, if
        it is cheaper than computing it.
        """
        self._copy_known(sequence, copies)
        size, first = self._pool.block_size, sequence.num_scheduled
        self.tier.restore(sequence, copies)
        if sequence.num_scheduled == first:
            return
        restored = range(first // size, sequence.num_scheduled // size)
        found = Counter(sequence.from_stores.pop(place, Tier.HOST).value for place in restored)
        self._count(sequence, {source: size * count for source, count in found.items()}, first)

    def _copy_known(self, sequence: Sequence, copies: StepCopies) -> None:
        """Copy known blocks into the sequence's own blocks, since a lease may refer to those."""
        size, first = self._pool.block_size, sequence.num_scheduled
        if first % size or sequence.wants_prompt_rows:
            return
        index = first // size
        known = self._pool.match(sequence.block_hashes[index : (len(sequence.tokens) - 1) // size])
        if not known:
            return
        num_tokens = len(known) * size
        fetched = size * self._pool.use_fetched(known)
        copies.copy(known, sequence.blocks[index : index + len(known)])
        copies.restored.append((sequence, num_tokens))
        sequence.num_inflight_tokens += num_tokens
        sequence.cached_tokens += num_tokens
        self._count(sequence, {DEVICE: num_tokens - fetched, FETCHED: fetched}, first)

    def _count(self, sequence: Sequence, found: Mapping[str, int], first: int) -> None:
        """Count tokens that were found, from this one on, by source, and what this saves."""
        counts = tuple([each for each in found.items() if each[1]])
        if not counts:
            return
        hits, token_bytes = self._pool.hits, self._pool.block_bytes / self._pool.block_size
        sequence.cached_from = tuple((Counter(dict(sequence.cached_from)) + Counter(dict(counts))).items())
        hits.looked_up(0, counts)
        hits.save(len(sequence.tokens), counts, self._estimate.cost, token_bytes, first)

    def _known(self, sequence: Sequence, *, share_tail: bool) -> tuple[list[int], int]:
        """Blocks that hold the KV of the sequence's first tokens already, and how many tokens that are.

        At least one token is left to compute, for its logits; and all of them when the prompt's own are wanted.
        """
        if sequence.wants_prompt_rows:
            return [], 0
        size, most = self._pool.block_size, len(sequence.tokens) - 1
        if sequence.borrows:  # the rest of the pool is for what follows
            most = min(most, self._pool.num_blocks // 2 * size)
        shared = self._pool.match(sequence.block_hashes[: most // size])
        if share_tail and not self._pool.has_state and most % size and len(shared) == most // size:
            # Siblings also share the last block, up to its last token.
            tail = self._pool.match([tail_hash(sequence.tokens, size, sequence.block_hashes, sequence.salt)])
            if tail:
                return shared + tail, most
        return shared, len(shared) * size

    def reserve(self, sequence: Sequence, shared: list[int], kept: int) -> bool:
        """Allocate blocks for a prompt that another worker computes, after the `shared` ones. False: not enough free.

        `kept` more blocks stay free. Takes over the references to `shared` in any case.
        """
        num_blocks = -(-len(sequence.tokens) // self._pool.block_size) - len(shared)
        if not self.fits(sequence, held=len(shared), wanted=num_blocks, kept=kept):
            self._pool.free(shared)
            return False
        sequence.blocks = shared + self._pool.allocate(num_blocks)
        sequence.num_cached_blocks = len(shared)
        sequence.cached_tokens = len(shared) * self._pool.block_size
        self._pool.hits.looked_up(len(sequence.tokens), ((DEVICE, sequence.cached_tokens),))
        return True

    # ---- a sequence grows --------------------------------------------------------------------------------------

    def is_writable(self, sequence: Sequence) -> bool:
        """Whether the next token has a block that this sequence may write."""
        index = sequence.num_scheduled // self._pool.block_size
        # A lease's reader stays behind the watermark, so the lease does not prevent writes.
        return index < len(sequence.blocks) and not self._pool.is_shared(
            sequence.blocks[index], owners=1 + sequence.leased
        )

    def make_writable(self, sequence: Sequence, copies: StepCopies) -> None:
        """Give the next token a private block: a new one, or a copy of a shared one."""
        index = sequence.num_scheduled // self._pool.block_size
        blocks = self._pool.allocate(1, copies.evicted)
        if index < len(sequence.blocks):
            copies.copy(sequence.blocks[index : index + 1], blocks)
        sequence.blocks[index : index + 1] = blocks

    def room(self, sequence: Sequence) -> int:
        """How many more tokens fit in its blocks, after allocating missing ones if all of them fit.

        For a sequence that borrows, as many as fit.
        """
        size = self._pool.block_size
        missing = -(-len(sequence.tokens) // size) - len(sequence.blocks)
        if sequence.borrows:
            missing = min(missing, self._step_blocks, self._pool.num_free - len(self._running))
        if missing > 0 and self.fits(sequence, held=len(sequence.blocks), wanted=missing):
            sequence.blocks += self._pool.allocate(missing)
        return len(sequence.blocks) * size - sequence.num_scheduled

    def cache_blocks(self, sequence: Sequence) -> None:
        """Add newly full blocks to the prefix cache.

        Of a sequence that was fetched in another dtype, only the fetched blocks: later ones attend to rounded KV, and
        so differ from the same tokens computed here.
        """
        if sequence.kv_dtype and (sequence.kv_dtype == MIXED_KV or sequence.state is not State.RESERVED):
            return
        full = sequence.num_computed // self._pool.block_size
        if full > sequence.num_cached_blocks:
            tokens, salt, size = sequence.tokens, sequence.salt, self._pool.block_size
            if len(sequence.block_hashes) < full:
                extend_hashes(sequence.block_hashes, tokens, size, salt, full * size)
            if len(sequence.prefix_hashes) < full * size // HASH_BLOCK_SIZE:
                known = sequence.prefix_hashes or prefix_hashes_of_prompt(sequence.request.prompt, salt)
                sequence.prefix_hashes = prefix_hashes(tokens, known=known, salt=salt, end=full * size)
            new = slice(sequence.num_cached_blocks, full)
            ends = {} if sequence.kv_dtype else prefix_hashes_of_blocks(sequence.prefix_hashes, new.start, full, size)
            prefixes = {sequence.blocks[index]: prefix_hash for index, prefix_hash in ends.items()}
            self._pool.cache_blocks(sequence.blocks[new], sequence.block_hashes[new], prefixes)
            sequence.num_cached_blocks = full
        if self._pool.has_state:
            return
        if sequence.request.group and sequence.num_output == 0 and sequence.num_computed == len(sequence.tokens):
            tail = tail_hash(sequence.tokens, self._pool.block_size, sequence.block_hashes, sequence.salt)
            block = sequence.blocks[full - (full * self._pool.block_size == sequence.num_computed)]
            self._pool.cache_block(block, tail)

    # ---- a sequence goes ---------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that will be recomputed."""
        self._pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_cached_blocks = 0
        self.borrowed.forget(sequence)
        sequence.restart()

    def release(self, sequence: Sequence) -> None:
        """Free all its blocks, also those on other workers."""
        self.borrowed.remove(sequence)
        self._pool.free(sequence.blocks)
        sequence.blocks = []

    def commit_copies(self, copies: StepCopies) -> None:
        """The step that made these copies has ended."""
        self._pool.free(copies.leaving)
        self.tier.commit_copies(copies)
