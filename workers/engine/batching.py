"""The batching policies of the literature, one screen each: which sequences the next step computes, and how much.

A policy fills a `Step` through its methods; the step keeps to budget, slots and blocks. A policy has no clock and no
device, and runs unchanged in the engine and in the simulator.

    static         a batch is fixed when it starts; no sequence joins until its longest answer has ended
    orca           every iteration: all decodes and whole new prompts; memory for the longest answers is reserved
    prefill-first  whole prompts as soon as they fit, alone; decodes only when no prompt can start
    chunked        all decodes, then chunks of prompts up to the token budget and the time that TPOT leaves
    adaptive       as chunked beside decodes; without any, whole prompts one after the other
    prefill-only   prompts in chunks of fixed size, never beside a decode

With pipeline stages, several steps are in flight. Each gets its part of the decodes and of the prompts, so that no
stage waits for another: "all decodes" means all that belong to this step.

Sources: Yu et al., Orca (OSDI'22); Kwon et al., vLLM (SOSP'23); Holmes et al., DeepSpeed-FastGen (2024) and Agrawal et
al., Sarathi-Serve (OSDI'24); Hu et al., TetriInfer (2024).
"""

import sys
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Protocol

from workers.config import ADAPTIVE_MARGIN, MISSED_SLO_SLOWDOWN
from workers.costs import CostModel
from workers.engine.sequence import Sequence, State


class Step(Protocol):
    """The step under construction. Sequences in transfer, or with all their tokens in flight, are not candidates."""

    # Running, with only their newest tokens to compute: one, and those that a grammar forces. Longest wait first.
    decodable: tuple[Sequence, ...]
    unfinished: tuple[Sequence, ...]  # running, with prompt tokens still to schedule, oldest first
    inflight_decodes: list[Sequence]  # decodes that other steps compute meanwhile
    now_s: float  # when the step begins
    budget_left: int  # tokens of the budget not taken yet
    prompt_share: int  # prompt tokens that this step may still take, so that all stages have work; one stage: no bound

    @property
    def has_waiting(self) -> bool:
        """Whether prompts wait for admission."""
        ...

    @property
    def cost(self) -> CostModel:
        """The estimated cost of steps."""
        ...

    def decode(self, sequence: Sequence) -> bool:
        """Compute the sequence's newest tokens; False when there is no block for it, no budget, or when it belongs in
        the next step, for the next stage to work on."""
        ...

    def chunk(self, sequence: Sequence, most: int | None = None) -> int:
        """Compute the next tokens of a prompt, at most this many (None: all, whatever the budget). Returns how many."""
        ...

    def admit(self, fits: Callable[[int], bool] | None = None) -> Sequence | None:
        """Admit the next waiting sequence: give it a slot and blocks for its tokens. None: empty queue, or no room, or
        `fits` refuses the number of tokens it has to compute."""
        ...


class Batching(Protocol):
    """`reserves_answer`: a sequence is admitted only if its longest possible answer fits as well."""

    reserves_answer: bool

    def fill_step(self, step: Step) -> None:
        """Fill the next step."""
        ...


def _whole_prompts(step: Step) -> int:
    """Schedule the rest of started prompts, and admit whole ones while the budget lasts. Returns how many prompts.

    The first may exceed the budget, because prompts are never cut here.
    """

    def fits(tokens: int) -> bool:
        return tokens <= min(step.budget_left, step.prompt_share)

    count = sum(step.chunk(sequence) > 0 for sequence in step.unfinished)
    while sequence := step.admit(fits if count else None):
        count += step.chunk(sequence) > 0
    return count


class Static:
    reserves_answer = True

    def __init__(self) -> None:
        self._batch: tuple[Sequence, ...] = ()

    def fill_step(self, step: Step) -> None:
        self._batch = tuple(each for each in self._batch if each.state is State.RUNNING)
        prompts = step.unfinished
        if not self._batch:
            prompts = (*prompts, *iter(step.admit, None))
            self._batch = (*step.decodable, *prompts)
        for sequence in step.decodable:
            if sequence in self._batch:
                step.decode(sequence)
        for sequence in prompts:
            if sequence in self._batch and step.prompt_share > 0:
                step.chunk(sequence)


class Orca:
    reserves_answer = True

    def fill_step(self, step: Step) -> None:
        for sequence in step.decodable:
            step.decode(sequence)
        _whole_prompts(step)


class PrefillFirst:
    reserves_answer = False

    def fill_step(self, step: Step) -> None:
        if not _whole_prompts(step):
            for sequence in step.decodable:
                step.decode(sequence)


class Chunked:
    """`tpot_slo_s` bounds a step that has a decode in it or beside it; so does the tightest `SLO.tpot_s` of them.

    An SLO that the smallest chunk misses cannot be met while prompts come: a step then takes at most twice as long as
    its decodes alone.
    """

    reserves_answer = False

    def __init__(self, tpot_slo_s: float | None = None, min_chunk: int = 16) -> None:
        self._tpot_slo_s = tpot_slo_s
        self._least_chunk = min_chunk

    def fill_step(self, step: Step) -> None:
        decoding = [sequence for sequence in step.decodable if step.decode(sequence)]
        if not step.unfinished and not step.has_waiting:
            return
        bound_s = self._bound_s([*decoding, *step.inflight_decodes], step.now_s)
        context_tokens = sum(len(sequence.tokens) for sequence in decoding)
        cost = step.cost
        chunks: list[tuple[int, int]] = []
        for sequence in chain(step.unfinished, iter(step.admit, None)):
            most = min(step.budget_left, step.prompt_share)
            first = sequence.num_scheduled
            within = sys.maxsize
            if bound_s is not None:
                within = cost.prompt_tokens_within(bound_s, first, chunks, len(decoding), context_tokens)
                if not chunks and within < self._least_chunk:
                    # However tight the SLO, prompts advance, and not in tiny chunks: each chunk costs a whole step.
                    loose_s = MISSED_SLO_SLOWDOWN * cost.decode_seconds(len(decoding), context_tokens)
                    within = cost.prompt_tokens_within(loose_s, first, chunks, len(decoding), context_tokens)
                    most = min(most, max(within, self._least_chunk))
                else:
                    most = min(most, within)
            if count := step.chunk(sequence, most):
                chunks.append((count, first))
            if min(step.budget_left, step.prompt_share) <= 0 or count >= within:
                return

    def _bound_s(self, decoding: list[Sequence], now_s: float) -> float | None:
        """The tightest TPOT SLO of these decodes; None: there is none.

        The decodes of other steps count: each stage has to compute this step between two of theirs.
        """
        slos = [self._tpot_slo_s, *(sequence.request.slo.tpot_s for sequence in decoding)]
        bounds = [slo_s for slo_s in slos if slo_s is not None]
        return min(bounds) if decoding and bounds else None


class Adaptive(Chunked):
    """Chunked while there are decodes, else whole prompts.

    Without decodes, chunks help no SLO: a prompt that ends in this step would be slowed down by the first chunk of the
    next one. Another whole prompt joins the step if the cost model expects one step to be no longer than two.

    With decodes, a TPOT SLO bounds the mean over an answer, so tokens that came early allow a longer step. It may last
    until the first stream would be behind, but no stream pauses for longer than `PAUSE` times its SLO. A single step
    uses `ADAPTIVE_MARGIN` of the SLO, and several use `AHEAD`: a stream that pauses once, for a handoff or a step that
    was longer than predicted, could hardly catch up.

    A stream whose KV arrives waits for the end of a step, so it is late before its first token here. While few streams
    arrive, no step is longer than the SLO, and prompts pause until the new stream has caught up. They do not pause
    where that could take more than `CATCH_UP_SHARE` of the time.
    """

    AHEAD = 0.92
    PAUSE = 4.0
    CATCH_UP_STEPS = 2  # a stream's first steps here, for which prompts may pause
    CATCH_UP_SHARE = 0.13
    ARRIVALS_SPAN_S = 10.0

    def __init__(self, tpot_slo_s: float | None = None, min_chunk: int = 16) -> None:
        super().__init__(tpot_slo_s, min_chunk)
        self._arrivals_s: deque[float] = deque()  # when KV arrived, within `ARRIVALS_SPAN_S`
        self._last_step_s = 0.0
        self._can_catch_up = False

    def fill_step(self, step: Step) -> None:
        if not step.decodable and not step.inflight_decodes:
            self._fill_prompts(step)
            return
        new = [sequence for sequence in step.decodable if self._is_new(sequence)]
        self._count_arrivals(new, step.now_s)
        self._can_catch_up = bool(self._arrivals_s) and self._catch_up_share(step) <= self.CATCH_UP_SHARE
        if self._can_catch_up and any(self._is_late(sequence, step.now_s) for sequence in new):
            for sequence in step.decodable:
                step.decode(sequence)
        else:
            super().fill_step(step)

    def _fill_prompts(self, step: Step) -> None:
        first = step.unfinished[0] if step.unfinished else step.admit()
        if first is None:
            return
        cost, begin = step.cost, first.num_scheduled
        chunks = [(step.chunk(first, self._room(step)), begin)]

        def joins(tokens: int, begin: int = 0) -> bool:
            apart_s = cost.mixed_seconds(chunks, 0, 0) + cost.prefill_seconds(tokens, begin)
            return tokens <= self._room(step) and cost.mixed_seconds((*chunks, (tokens, begin)), 0, 0) <= apart_s

        for sequence in chain(step.unfinished[1:], iter(lambda: step.admit(joins), None)):
            begin = sequence.num_scheduled
            if joins(len(sequence.tokens) - begin, begin):
                chunks.append((step.chunk(sequence), begin))

    def _bound_s(self, decoding: list[Sequence], now_s: float) -> float | None:
        """Until the first of them would be behind; not less than one step's share of the SLO."""
        pause = 1.0 if self._can_catch_up else self.PAUSE
        bounds = []
        for sequence in decoding:
            slo_s = super()._bound_s([sequence], now_s)
            if slo_s is not None:
                ahead_s = sequence.next_due_s(self.AHEAD * slo_s) - now_s
                bounds.append(min(max(ADAPTIVE_MARGIN * slo_s, ahead_s), pause * slo_s))
        return min(bounds, default=None)

    def _is_new(self, sequence: Sequence) -> bool:
        """Whether its KV came from another worker and these are its first steps here."""
        came = sequence.ready_s is not None and sequence.first_token_s is None
        return came and len(sequence.tokens) - sequence.num_initial_tokens <= self.CATCH_UP_STEPS

    def _count_arrivals(self, new: list[Sequence], now_s: float) -> None:
        ready_s = (sequence.ready_s for sequence in new if sequence.ready_s is not None)
        self._arrivals_s.extend(at_s for at_s in ready_s if at_s > self._last_step_s)
        self._last_step_s = now_s
        while self._arrivals_s and self._arrivals_s[0] < now_s - self.ARRIVALS_SPAN_S:
            self._arrivals_s.popleft()

    def _catch_up_share(self, step: Step) -> float:
        """The most of the time that steps without prompts take, if streams go on arriving at this rate."""
        context_tokens = sum(len(sequence.tokens) for sequence in step.decodable)
        step_s = step.cost.decode_seconds(len(step.decodable), context_tokens)
        return len(self._arrivals_s) * self.CATCH_UP_STEPS * step_s / self.ARRIVALS_SPAN_S

    def _is_late(self, sequence: Sequence, now_s: float) -> bool:
        """Whether its next token would come late after a step as long as the SLO allows."""
        slo_s = super()._bound_s([sequence], now_s)
        return slo_s is not None and sequence.next_due_s(slo_s) - now_s < ADAPTIVE_MARGIN * slo_s

    @staticmethod
    def _room(step: Step) -> int:
        return min(step.budget_left, step.prompt_share)


class PrefillOnly:
    reserves_answer = False

    def fill_step(self, step: Step) -> None:
        prompts = chain(step.unfinished, iter(step.admit, None))
        computed = 0
        while step.budget_left > 0 and (sequence := next(prompts, None)) is not None:
            computed += step.chunk(sequence, step.budget_left)
        if not computed:
            for sequence in step.decodable:
                step.decode(sequence)


def batching(name: str, *, tpot_slo_s: float | None, block_size: int) -> Batching:
    """A fresh policy by the name that `engine.batching` gives; the name was checked there."""
    policies: dict[str, Callable[[], Batching]] = {
        "static": Static,
        "orca": Orca,
        "prefill-first": PrefillFirst,
        "chunked": lambda: Chunked(tpot_slo_s, min_chunk=min(16, block_size)),
        "adaptive": lambda: Adaptive(tpot_slo_s, min_chunk=min(16, block_size)),
        "prefill-only": PrefillOnly,
    }
    return policies[name]()
