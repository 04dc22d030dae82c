"""Queues, slots and blocks: the mechanics under every batching policy.

What a step computes is the policy's decision (`batching`); who gets blocks for it, and who must give them up, is
decided here. Out of blocks, the youngest sequence goes, all of it: its KV is saved in host memory or computed again
later, whichever the cost model finds cheaper. It is first in the queue to come back, so the oldest always moves on.
Pure: no clock, no device.

Source of preemption by swap or recomputation, all or nothing: Kwon et al., vLLM (SOSP'23).
"""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice

from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.batching import batching
from workers.engine.blocks import BlockPool, HostBlocks, prefix_hashes, tail_hash
from workers.engine.estimate import StepEstimate
from workers.engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` tokens of a sequence, from its `num_computed` on."""

    sequence: Sequence
    count: int


class Scheduler:
    """Owns the queues. Shares the BlockPool and the estimate with its Engine. `block_bytes`: of one block's KV."""

    def __init__(self, config: EngineConfig, pool: BlockPool, estimate: StepEstimate, block_bytes: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.host = HostBlocks(config.swap_blocks)
        self.preemptions = 0
        self.swaps = 0
        self._config = config
        self._pool = pool
        self._estimate = estimate
        self._block_bytes = block_bytes
        self._policy = batching(config.batching, tpot_slo_s=config.tpot_slo_s, block_size=config.block_size)
        self._arrivals = 0
        self._leaving: deque[list[int]] = deque()  # of each step in flight: blocks that its copies still read

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt."""
        sequence.number = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def schedule(self) -> "StepDraft | None":
        """What the next step computes and copies; None when that is nothing."""
        ready = [each for each in self.running if not each.in_flight]
        draft = StepDraft(self, ready, self._config.max_batch_tokens, self._estimate.cost)
        draft.coming = sum(map(len, self._leaving))
        self._policy.compose(draft)
        if not (draft.slices or draft.swap_out or draft.swap_in or draft.copies):
            return None
        # The kernels want one-token runs first.
        draft.slices.sort(key=lambda each: each.count > 1)
        self._leaving.append(draft.leaving)
        return draft

    def done(self) -> None:
        """The oldest step in flight has ended, and its copies with it."""
        self._pool.free(self._leaving.popleft())

    def leaving(self) -> Items[Items[int]]:
        """Blocks that no sequence owns any more, but that steps in flight still read."""
        return self._leaving

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whichever queue it is in, and give its blocks back, those on the host too."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state in (State.WAITING, State.SWAPPED):
            self.waiting.remove(sequence)
        self._pool.free(sequence.blocks)
        self.host.free(sequence.host_blocks)
        sequence.blocks, sequence.host_blocks = [], []

    def fits(self, sequence: Sequence, *, held: int, wanted: int) -> bool:
        """Whether `wanted` more blocks are free for a sequence that would then hold `held` + `wanted`.

        One block for each running sequence stays free, so that letting one in does not preempt another at once; under a
        policy that reserves answers, as many as the longest ones take.
        """
        if self._policy.reserves_answer:
            spare = sum(max(0, self._longest(each) - len(each.blocks)) for each in self.running)
            wanted = max(wanted, self._longest(sequence) - held)
        else:
            spare = 0 if sequence.hold else len(self.running)
        return wanted + spare <= self._pool.num_free

    def _longest(self, sequence: Sequence) -> int:
        """Blocks of the sequence with its longest possible answer."""
        num_tokens = len(sequence.tokens)
        if not sequence.hold:
            most = sequence.request.sampling.max_tokens
            num_tokens = sequence.max_length if most is None else len(sequence.request.prompt) + most
        return -(-min(num_tokens, sequence.max_length) // self._pool.block_size)

    # ---- letting in --------------------------------------------------------------------------------------------

    def admit(self, draft: "StepDraft", most: int | None) -> Sequence | None:
        """See `batching.Step.admit`."""
        if len(self.running) >= self._config.max_running:
            return None
        sequence = self._next()
        if sequence is None or (most is not None and len(sequence.tokens) - sequence.num_computed > most):
            return None
        if not (self._swap_in(sequence, draft) if sequence.state is State.SWAPPED else self._place(sequence)):
            return None
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = State.RUNNING
        return sequence

    def _next(self) -> Sequence | None:
        """Whose turn it is: preempted ones first, then in the configured order.

        A prompt whose sibling is computing the very same tokens lets others pass: it will share them.
        """
        candidates = (each for each in self.waiting if not self._awaits_sibling(each))
        first = next(candidates, None)
        if first is None or self._config.prompt_order == "fcfs" or first.was_preempted:
            return first
        # By windows of arrivals: nobody is overtaken by more than one window.
        sign, window = (1 if self._config.prompt_order == "sjf" else -1), self._config.prompt_window
        return min(
            [first, *islice(candidates, window)],
            key=lambda each: (each.number // window, sign * len(each.tokens), each.number),
        )

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        group = sequence.request.group
        return bool(group) and any(
            each.request.group == group
            and each.num_computed < len(sequence.tokens) - 1
            and each.tokens == sequence.tokens
            for each in self.running
        )

    def _place(self, sequence: Sequence) -> bool:
        """Blocks for all tokens the sequence has, known prefixes shared. False: they are not free."""
        size = self._pool.block_size
        sequence.hashes = prefix_hashes(sequence.tokens, size, sequence.hashes)
        if sequence.request.fresh:
            self._pool.forget(sequence.hashes)
        for share_tail in (True, False) if sequence.request.group else (False,):
            shared, computed = self._known(sequence, share_tail=share_tail)
            to_copy = computed % size > 0  # a shared tail is copied before it is written
            num_blocks = -(-len(sequence.tokens) // size) - len(shared)
            if self.fits(sequence, held=len(shared) - to_copy, wanted=num_blocks + to_copy):
                sequence.blocks = shared + self._pool.allocate(num_blocks)
                sequence.num_computed = sequence.cached_tokens = computed
                sequence.num_named = computed // size
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
            tail = self._pool.match([tail_hash(sequence.tokens, size, sequence.hashes)])
            if tail:
                return shared + tail, most
        return shared, len(shared) * size

    def _swap_in(self, sequence: Sequence, draft: "StepDraft") -> bool:
        num_blocks = len(sequence.host_blocks)
        grows = sequence.num_computed == num_blocks * self._pool.block_size
        if not self.fits(sequence, held=0, wanted=num_blocks + grows):
            return False
        sequence.blocks = self._pool.allocate(num_blocks)
        draft.swap_in += zip(sequence.host_blocks, sequence.blocks, strict=True)
        # Free at once: whatever is saved there next is saved by a later step, and steps run in order.
        self.host.free(sequence.host_blocks)
        sequence.host_blocks = []
        return True

    # ---- blocks for what is computed -----------------------------------------------------------------------------

    def make_writable(self, sequence: Sequence, draft: "StepDraft") -> bool:
        """A block of its own under the next token: a new one, or a copy of one that others hold too."""
        index = sequence.num_computed // self._pool.block_size
        grows = index == len(sequence.blocks)
        # The reader of a lease stays behind the watermark: its own prompt may be written on.
        if not grows and not self._pool.is_shared(sequence.blocks[index], owners=1 + sequence.leased):
            return True
        if not self._make_room(sequence, draft):
            return False
        blocks = self._pool.allocate(1)
        if not grows:
            draft.copies.append((sequence.blocks[index], blocks[0]))
            draft.leaving.append(sequence.blocks[index])  # let go once it is copied
        sequence.blocks[index : index + 1] = blocks
        return True

    def _make_room(self, sequence: Sequence, draft: "StepDraft") -> bool:
        """A free block, by preempting younger sequences or at last this one. False: not in this step."""
        while not self._pool.num_free:
            if draft.coming > 0:  # one comes free when a step ends: wait for it
                draft.coming -= 1
                return False
            # A held prompt is never preempted: a reader may be half way through it.
            victims = [s for s in self.running if not (s.in_flight or s.hold or s in draft.chosen)]
            victim = max(victims, key=lambda s: (s.arrival_s, s.number), default=sequence)
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, draft: "StepDraft") -> None:
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
        if self._config.preemption == "swap":
            return True
        cost = self._estimate.cost
        return cost.swap_seconds(len(sequence.blocks) * self._block_bytes) < cost.prefill_seconds(sequence.num_computed)


class StepDraft:
    """One step in the making: `batching.Step` to the policy, and its outcome to the engine."""

    def __init__(self, scheduler: Scheduler, ready: Items[Sequence], budget: int, cost: CostModel) -> None:
        self.left = budget
        self.cost = cost
        self.decodable = tuple(each for each in ready if each.is_decoding)
        self.unfinished = tuple(each for each in ready if not each.is_decoding)
        self.slices: list[Slice] = []
        self.chosen: set[Sequence] = set()
        self.admitted: list[Sequence] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.leaving: list[int] = []  # blocks to free when this step has ended
        self.coming = 0  # blocks that come free with steps under way, and that nobody waits for yet
        self._scheduler = scheduler

    def decode(self, sequence: Sequence) -> bool:
        return self.left > 0 and self.chunk(sequence, 1) == 1

    def chunk(self, sequence: Sequence, most: int | None = None) -> int:
        missing = len(sequence.tokens) - sequence.num_computed
        count = missing if most is None else min(missing, most)
        if count <= 0 or sequence.state is not State.RUNNING or not self._scheduler.make_writable(sequence, self):
            return 0
        self.chosen.add(sequence)
        self.slices.append(Slice(sequence, count))
        self.left -= count
        return count

    def admit(self, most: int | None = None) -> Sequence | None:
        sequence = self._scheduler.admit(self, most)
        if sequence is not None:
            self.admitted.append(sequence)
        return sequence
