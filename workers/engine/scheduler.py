"""Queues, slots and blocks: the mechanics under every batching policy.

What a step computes is the policy's decision (`batching`); who gets blocks for it, and who must give them up, is
decided here. Out of blocks, the youngest sequence goes, all of it: its KV is saved in host memory or computed again
later, whichever the cost model finds cheaper. It is first in the queue to come back, so the oldest always moves on.
Several steps may be in flight, one for each stage of a pipeline; they run in order, and nobody in them is preempted.
Pure: no clock, no device.

Source of preemption by swap or recomputation, all or nothing: Kwon et al., vLLM (SOSP'23).
"""

import sys
from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice

from workers.config import EngineConfig
from workers.engine.batching import batching
from workers.engine.blocks import BlockPool, HostBlocks, prefix_hashes, tail_hash
from workers.engine.draft import StepDraft
from workers.engine.estimate import StepEstimate, prompt_share
from workers.engine.host_tier import HostMoves, HostTier
from workers.engine.leases import LeaseBook
from workers.engine.promises import next_prompt
from workers.engine.sequence import Sequence, State


@dataclass(slots=True)
class _Flight:
    """A step under way: the sequences whose blocks it touches, and blocks without them that its copies still read."""

    sequences: tuple[Sequence, ...]
    leaving: list[int]
    moves: HostMoves


class Scheduler:
    """Owns the queues. Shares the BlockPool, the leases and the estimate with its Engine.

    `block_bytes`: of one block's KV. `depth`: how many steps are to be in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        leases: LeaseBook,
        estimate: StepEstimate,
        block_bytes: int,
        depth: int = 1,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.host = HostBlocks(config.swap_blocks)
        self.preemptions = 0
        self.swaps = 0
        self._config = config
        self._pool = pool
        self._leases = leases
        self._estimate = estimate
        self._block_bytes = block_bytes
        self._tier = HostTier(pool, estimate, block_bytes, -(-config.max_batch_tokens // config.block_size))
        self._depth = depth
        self._policy = batching(config.batching, tpot_slo_s=config.tpot_slo_s, block_size=config.block_size)
        self._arrivals = 0
        self._flights: deque[_Flight] = deque()
        self._steps = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt."""
        sequence.number = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def schedule(self, now_s: float) -> StepDraft | None:
        """What the next step computes and copies; None when that is nothing.

        With an `error` it computes nothing: it is in flight only so that whoever it has touched fails when it lands.
        """
        if not self.running and not self.waiting:
            return None
        decodable, unfinished, ordered = self._sorted()
        draft = StepDraft(
            self,
            now_s=now_s,
            decodable=tuple(decodable),
            unfinished=tuple(unfinished),
            beside=[each for each in ordered if each.num_computed >= each.num_given],
            rows=self._rows(len(decodable), len(decodable) + len(ordered)),
            budget=self._config.max_batch_tokens,
            share=self._prompt_share(),
            estimate=self._estimate,
        )
        for flight in self._flights:
            draft.coming += len(flight.leaving) + len(flight.moves.saving)
        try:
            self._policy.compose(draft)
        except Exception as error:
            draft.error = error
            if draft.at_hand is None:  # nobody to fail: it would come again for ever
                raise
            draft.admitted.append(draft.at_hand)
            self._take_off(draft)
            return draft
        if not (draft.slices or draft.swap_out or draft.admitted):
            return None
        self._tier.save(draft.moves)
        self._take_off(draft)
        return draft

    def _sorted(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Of those who run: who decodes, who has prompt tokens still to order, and whose tokens are all in flight."""
        decodable: list[Sequence] = []
        unfinished: list[Sequence] = []
        ordered: list[Sequence] = []
        for each in self.running:
            if each.doomed:
                continue
            num_tokens = len(each.tokens)
            num_missing = num_tokens - each.num_computed - each.num_ordered
            if num_missing == 0:
                ordered.append(each)
            elif num_missing == 1 and num_tokens > each.num_given:
                decodable.append(each)
            else:
                unfinished.append(each)
        if self._depth > 1:
            decodable.sort(key=lambda each: each.last_step)
        return decodable, unfinished, ordered

    def _rows(self, num_ready: int, num_decoding: int) -> int:
        """How many decodes the next step takes: an equal part for each step that is to be in flight.

        The bound over all keeps groups from growing together when others end; the one over those who are ready deals
        them out when nothing is in flight yet.
        """
        num_free = max(1, self._depth - len(self._flights))
        return min(-(-num_decoding // self._depth), -(-num_ready // num_free))

    def _prompt_share(self) -> int:
        """Prompt tokens that the next step takes so that other stages have some too, of all that are here."""
        if self._depth == 1:
            return sys.maxsize
        prompts = [each for each in self.running if each.is_prefilling]
        num_tokens = sum(len(each.tokens) for each in (*prompts, *self.waiting))
        return prompt_share(self._estimate.cost, num_tokens, self._depth)

    def _take_off(self, draft: StepDraft) -> None:
        self._steps += 1
        # The kernels want one-token runs first.
        draft.slices.sort(key=lambda each: each.count > 1)
        touched = tuple(dict.fromkeys([*[each.sequence for each in draft.slices], *draft.admitted]))
        for sequence in touched:
            sequence.in_flight += 1
            sequence.last_step = self._steps
        self._flights.append(_Flight(touched, draft.leaving, draft.moves))

    def land(self) -> Items[Sequence]:
        """The oldest step in flight has ended, and its copies with it. Answers the sequences it touched."""
        flight = self._flights.popleft()
        self._pool.free(flight.leaving)
        self._tier.land(flight.moves)
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        return flight.sequences

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def leaving(self) -> Items[Items[int]]:
        """Blocks that no sequence owns any more, but that steps in flight still read."""
        return [flight.leaving + flight.moves.saving for flight in self._flights]

    def not_saved(self, host_blocks: Items[int]) -> None:
        """The step that was to save these failed: those who count on them compute their tokens again."""
        lost = set(host_blocks)
        for each in self.waiting:
            if each.state is State.SWAPPED and not lost.isdisjoint(each.host_blocks):
                self.host.free(each.host_blocks)
                each.host_blocks = []
                each.restart()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whichever queue it is in, and give its blocks back, those on the host too."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state in (State.WAITING, State.SWAPPED):
            self.waiting.remove(sequence)
        self._pool.free(sequence.blocks)
        self.host.free(sequence.host_blocks)
        sequence.blocks, sequence.host_blocks = [], []

    def fits(self, sequence: Sequence, *, held: int, wanted: int, kept: int = 0) -> bool:
        """Whether `wanted` more blocks are free for a sequence that would then hold `held` + `wanted`, and `kept` more.

        One block for each running sequence stays free, so that letting one in does not preempt another at once; under a
        policy that reserves answers, as many as the longest ones take.
        """
        if self._policy.reserves_answer:
            spare = sum(max(0, self._longest(each) - len(each.blocks)) for each in self.running)
            wanted = max(wanted, self._longest(sequence) - held)
        else:
            spare = 0 if sequence.hold else len(self.running)
        return wanted + spare + kept <= self._pool.num_free

    def _longest(self, sequence: Sequence) -> int:
        """Blocks of the sequence with its longest possible answer."""
        num_tokens = len(sequence.tokens)
        if not sequence.hold:
            most = sequence.request.sampling.max_tokens
            num_tokens = sequence.max_length if most is None else len(sequence.request.prompt) + most
        return -(-min(num_tokens, sequence.max_length) // self._pool.block_size)

    def check(self) -> None:
        """Prove that host blocks balance, and that what is in flight is what the steps hold. Raises AssertionError."""
        self.host.check([each.host_blocks for each in self.waiting])
        touched = Counter(each.key for flight in self._flights for each in flight.sequences)
        assert touched == Counter({each.key: each.in_flight for each in self.running if each.in_flight}), "flights"
        assert not any(each.in_flight or each.num_ordered for each in self.waiting), "somebody waits in flight"
        for each in self.running:
            assert each.num_scheduled <= min(len(each.tokens), len(each.blocks) * self._pool.block_size), each.key
            assert each.in_flight or not each.num_ordered, f"tokens of {each.key} are ordered, but from nobody"

    # ---- letting in --------------------------------------------------------------------------------------------

    def admit(self, draft: StepDraft, most: int | None) -> Sequence | None:
        """See `batching.Step.admit`."""
        if len(self.running) >= self._config.max_running:
            return None
        sequence = self._next(draft.now_s)
        if sequence is None or (most is not None and len(sequence.tokens) - sequence.num_computed > most):
            return None
        draft.at_hand = sequence
        if not (self._swap_in(sequence, draft) if sequence.state is State.SWAPPED else self._place(sequence, draft)):
            return None
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = State.RUNNING
        return sequence

    def _next(self, now_s: float) -> Sequence | None:
        """Whose turn it is: preempted ones first, then in the configured order.

        A prompt whose sibling is computing the very same tokens lets others pass: it will share them.
        """
        candidates = (each for each in self.waiting if not self._awaits_sibling(each))
        first = next(candidates, None)
        if first is None or self._config.prompt_order == "fcfs" or first.was_preempted:
            return first
        window = islice(candidates, self._config.prompt_window)
        return next_prompt([first, *window], self._config, self._estimate.prompt_seconds, now_s)

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        group = sequence.request.group
        return bool(group) and any(
            each.request.group == group
            and each.num_computed < len(sequence.tokens) - 1
            and each.tokens == sequence.tokens
            and each.request.cache_salt == sequence.request.cache_salt
            for each in self.running
        )

    def _place(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Blocks for all tokens the sequence has, known prefixes shared. False: they are not free.

        A shared tail is copied at once: a lease of these blocks must name the one that will be written.
        """
        size = self._pool.block_size
        sequence.hashes = prefix_hashes(sequence.tokens, size, sequence.hashes, sequence.salt)
        if sequence.request.fresh:
            self._pool.forget(sequence.hashes)
        for share_tail in (True, False) if sequence.request.group else (False,):
            shared, computed = self._known(sequence, share_tail=share_tail)
            tail = shared[computed // size :]
            num_kept = len(shared) - len(tail)
            num_blocks = -(-len(sequence.tokens) // size) - num_kept
            if self.fits(sequence, held=num_kept, wanted=num_blocks):
                sequence.blocks = shared[:num_kept] + self._pool.allocate(num_blocks, draft.moves.evicted)
                draft.copy(tail, sequence.blocks[num_kept:][: len(tail)])
                sequence.num_computed = sequence.cached_tokens = computed
                sequence.num_named = computed // size
                if not tail:
                    self._tier.restore(sequence, draft.moves)
                self._pool.looked_up(len(sequence.tokens), sequence.cached_tokens)
                return True
            self._pool.free(shared)
        return False

    def _known(self, sequence: Sequence, *, share_tail: bool) -> tuple[list[int], int]:
        """Blocks that hold the KV of the sequence's first tokens already, and how many tokens that are.

        At least one token is left to compute, for its logits; and all of them when the prompt's own are wanted.
        """
        if sequence.wants_prompt_logprobs:
            return [], 0
        size, most = self._pool.block_size, len(sequence.tokens) - 1
        shared = self._pool.match(sequence.hashes[: most // size])
        if share_tail and most % size and len(shared) == most // size:
            # Siblings share the last block too, up to its last token.
            tail = self._pool.match([tail_hash(sequence.tokens, size, sequence.hashes, sequence.salt)])
            if tail:
                return shared + tail, most
        return shared, len(shared) * size

    def _swap_in(self, sequence: Sequence, draft: StepDraft) -> bool:
        num_blocks = len(sequence.host_blocks)
        grows = sequence.num_computed == num_blocks * self._pool.block_size
        if not self.fits(sequence, held=0, wanted=num_blocks + grows):
            return False
        sequence.blocks = self._pool.allocate(num_blocks, draft.moves.evicted)
        draft.swap_in += zip(sequence.host_blocks, sequence.blocks, strict=True)
        # Free at once: whatever is saved there next is saved by a later step, and steps run in order.
        self.host.free(sequence.host_blocks)
        sequence.host_blocks = []
        return True

    # ---- blocks for what is computed -----------------------------------------------------------------------------

    def make_writable(self, sequence: Sequence, draft: StepDraft) -> bool:
        """A block of its own under the next token: a new one, or a copy of one that others hold too."""
        index = sequence.num_scheduled // self._pool.block_size
        grows = index == len(sequence.blocks)
        # The reader of a lease stays behind the watermark: its own prompt may be written on.
        if not grows and not self._pool.is_shared(sequence.blocks[index], owners=1 + sequence.leased):
            return True
        if not self._make_room(sequence, draft):
            return False
        blocks = self._pool.allocate(1, draft.moves.evicted)
        if not grows:
            draft.copy(sequence.blocks[index : index + 1], blocks)
        sequence.blocks[index : index + 1] = blocks
        return True

    def room(self, sequence: Sequence) -> int:
        """How many more tokens the blocks that it has, and some more for what is missing, can take."""
        size = self._pool.block_size
        missing = -(-len(sequence.tokens) // size) - len(sequence.blocks)
        if missing > 0 and self.fits(sequence, held=len(sequence.blocks), wanted=missing):
            sequence.blocks += self._pool.allocate(missing)
        return len(sequence.blocks) * size - sequence.num_scheduled

    def _make_room(self, sequence: Sequence, draft: StepDraft) -> bool:
        """A free block, by preempting younger sequences or at last this one. False: not in this step."""
        while not self._pool.num_free:
            if draft.coming > 0:  # one comes free when a step ends: wait for it
                draft.coming -= 1
                return False
            # A held prompt is never preempted: a reader may be half way through it.
            others = [s for s in self.running if not (s.hold or s in draft.chosen or s in draft.admitted)]
            victim = max(others, key=lambda s: (s.arrival_s, s.number), default=None)
            if victim is None:
                return False
            if victim.in_flight:  # rather wait for its steps to end, and order no more of it, than take an older one
                draft.stopped.add(victim)
                return False
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, draft: StepDraft) -> None:
        self._leases.drop(sequence.key)  # it was to be taken over; its reader is refused, and the sequence stays here
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.was_preempted = True
        self.preemptions += 1
        if self._should_swap(sequence):
            self.swaps += 1
            sequence.state = State.SWAPPED
            sequence.host_blocks = self.host.allocate(len(sequence.blocks))
            draft.swap_out += zip(sequence.blocks, sequence.host_blocks, strict=True)
            draft.leaving += sequence.blocks  # free once they are saved
            draft.coming += len(sequence.blocks)
        else:
            self._pool.free(sequence.blocks)
            sequence.restart()
        sequence.blocks = []
        sequence.num_named = 0

    def _should_swap(self, sequence: Sequence) -> bool:
        if self._config.preemption == "recompute" or len(sequence.blocks) > self.host.num_free:
            return False
        if (
            self._config.preemption == "swap" or sequence.kv_dtype
        ):  # what was rounded on its way cannot be computed here
            return True
        cost = self._estimate.cost
        return cost.swap_seconds(len(sequence.blocks) * self._block_bytes) < cost.prefill_seconds(sequence.num_computed)
