"""The tokens that grammars allow, for the rank that samples: one packed mask for each sequence with a grammar.

    plan arrives ──> begin: a thread brings each matcher up to date and computes its mask ┐
                └──> the compute thread runs the model ──> logits ────────────────────────┴──> sampler

A matcher is found by its sequence's key. One that is missing, or does not fit the answer's tokens, is made anew from
these tokens; nothing else is ever needed, so matchers may be dropped at any time.

An answer whose masks take long has them computed apart. Where its mask is not there in time, only this answer gets no
token in the step: it computes its last token again in the next one, and samples then.

Where only one text can follow, the next token is the first one of that text as the tokenizer writes it. This holds
however the answer got there, so tokens that are forced behind a sampled one need not be sampled.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import get_native_id
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workers.engine.step import Chunk, Draw, StepPlan
from workers.errors import InvalidRequest
from workers.model.grammar import GrammarCompiler, reason
from workers.request import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MATCHERS = 512  # the least recently used are dropped
MAX_FORCED = 64  # tokens behind a sampled one
SLOW_S = 0.001  # of computation: an answer whose last masks took longer may miss a step
SLOW_DECAY = 0.95  # of that time with each quicker mask
LATE_S = 0.003  # that a step waits for the masks of such answers, if there are others
SLOW_NICENESS = 10  # of the thread that computes them

Mask = NDArray[np.int32]  # [vocab / 32]: bit i of word w is token 32 * w + i
Allowed = Mapping[int, Mask]  # of a row of logits; rows without a grammar are missing


@dataclass(slots=True)
class _Running:
    grammar: Grammar
    matcher: "LLMatcher"
    answer: bytes  # the tokens that it has seen
    mask_s: float = 0.0  # of computation: the longest of its last masks
    slow: "tuple[bytes, Future[Mask | str]] | None" = None  # its last mask that was computed apart, and behind what

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.matcher.is_stopped():  # only end tokens may follow, with `ignore_eos`
                break
            self.matcher.consume_token(token)
        self.answer += np.array(tokens, np.int32).tobytes()

    def forced(self) -> int | None:
        """The token that must follow, if there is only one text."""
        if self.matcher.is_stopped() or self.matcher.is_error():
            return None
        return next(iter(self.matcher.compute_ff_tokens()), None)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """By the index of the chunk: the mask, or why there is none.

    `jumping`: of answers that need no log probabilities, so that forced tokens need no sample. `slow`: masks that may
    not be there yet.
    """

    masks: Mapping[int, Mask]
    stuck: Mapping[int, str]
    jumping: Mapping[int, _Running]
    slow: "Mapping[int, Future[Mask | str]]" = field(default_factory=dict)

    def settled(self, needed: Callable[[int], bool], wait_s: float) -> tuple["StepMasks", tuple[int, ...]]:
        """The same with the slow masks that are there after `wait_s`; and the chunks of the others, which sample later.

        `needed`: of an index: whether its mask is waited for as long as it takes.
        """
        if not self.slow:
            return self, ()
        wait([each for index, each in self.slow.items() if not needed(index)], wait_s)
        masks, stuck, late = dict(self.masks), dict(self.stuck), []
        for index, filling in self.slow.items():
            if filling.done() or needed(index):
                _put(index, filling.result(MASKS_TIMEOUT_S), masks, stuck)
            else:
                late.append(index)
        return StepMasks(masks, stuck, self.jumping), tuple(late)

    def forced(self, sampled: Sequence[int | None]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What must follow these tokens, one for each chunk: pairs (index of the chunk, tokens)."""
        pairs = ((index, self._behind(running, sampled[index])) for index, running in self.jumping.items())
        return tuple((index, tokens) for index, tokens in pairs if tokens)

    def _behind(self, running: _Running, sampled: int | None) -> tuple[int, ...]:
        if sampled is None:
            return ()
        running.consume((sampled,))
        tokens: list[int] = []
        while len(tokens) < MAX_FORCED and (token := running.forced()) is not None:
            running.consume((token,))
            tokens.append(token)
        return tuple(tokens)


NO_MASKS = StepMasks({}, {}, {})
MASKS_TIMEOUT_S = 60.0  # never reached: a mask is bounded by `workers.model.grammar.LIMITS`


class GrammarMasks:
    """Owned by a `Rank`; `close` ends its threads. `num_threads` compute quick masks, one slow ones; one compiles."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, num_threads: int) -> None:
        self._compiler = compiler
        self._num_words = -(-vocab_size // 32)
        self._matchers: OrderedDict[str, _Running] = OrderedDict()
        self._masking = ThreadPoolExecutor(1, "grammar-masks")
        self._quick = ThreadPoolExecutor(num_threads, "quick-masks")
        self._slow = ThreadPoolExecutor(1, "slow-masks", initializer=_yield_to_others)
        self._compiling = ThreadPoolExecutor(1, "grammars")

    def prepare(self, grammar: Grammar) -> "Future[None]":
        """Compile it, not in the way of masks. Raises `InvalidRequest`."""
        return self._compiling.submit(self._compile, grammar)

    def _compile(self, grammar: Grammar) -> None:
        self._compiler.matcher(grammar)

    def begin(self, plan: StepPlan) -> "Future[StepMasks] | None":
        """The masks of this plan; None: it needs none. Plans that sample for the same sequence never overlap."""
        wanted = [
            (index, chunk, chunk.draw, chunk.draw.params.grammar)
            for index, chunk in enumerate(plan.chunks)
            if chunk.draw is not None and chunk.draw.params.grammar is not None
        ]
        return self._masking.submit(self._compute, wanted) if wanted else None

    def _compute(self, wanted: Sequence[tuple[int, Chunk, Draw, Grammar]]) -> StepMasks:
        stuck: dict[int, str] = {}
        masks: dict[int, Mask] = {}
        jumping: dict[int, _Running] = {}
        quick: dict[int, Future[Mask | str]] = {}
        slow: dict[int, Future[Mask | str]] = {}
        for index, chunk, draw, grammar in wanted:
            try:
                running = self._running(chunk.key, grammar, draw.answer)
            except InvalidRequest as error:
                stuck[index] = error.message
                continue
            if draw.params.logprobs is None:
                jumping[index] = running
            if running.slow is not None:
                slow[index] = running.slow[1]
            elif (token := running.forced()) is not None:
                masks[index] = self._only(token)
            elif running.mask_s > SLOW_S:
                slow[index] = self._slow.submit(self._fill, running, draw.banned)
                running.slow = draw.answer, slow[index]
            else:
                quick[index] = self._quick.submit(self._fill, running, draw.banned)
        for index, filling in quick.items():
            _put(index, filling.result(), masks, stuck)
        return StepMasks(masks, stuck, jumping, slow)

    def _fill(self, running: _Running, banned: Sequence[int]) -> Mask | str:
        """The mask; or why there is none."""
        from llguidance.numpy import fill_next_token_bitmask

        begun_s = thread_time()
        words = np.zeros((1, self._num_words), np.int32)
        fill_next_token_bitmask(running.matcher, words)
        running.mask_s = max(thread_time() - begun_s, SLOW_DECAY * running.mask_s)
        if running.matcher.is_error():
            return reason(running.matcher)
        return _without(words[0], banned) if words.any() else "it allows no token"

    def _only(self, token: int) -> Mask:
        mask = np.zeros(self._num_words, np.int32)
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        return mask

    def _running(self, key: str, grammar: Grammar, answer: bytes) -> _Running:
        """The sequence's matcher behind these tokens. Raises `InvalidRequest`."""
        running = self._matchers.pop(key, None)
        if running is not None and running.slow is not None and running.slow[0] != answer:
            if running.slow[1].done():
                running.slow = None
            else:  # its matcher is in use
                running = None
        if running is None or running.grammar != grammar or not answer.startswith(running.answer):
            running = _Running(grammar, self._compiler.matcher(grammar), b"")
        running.consume(np.frombuffer(answer[len(running.answer) :], np.int32).tolist())
        self._matchers[key] = running
        while len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return running

    def close(self) -> None:
        for threads in (self._masking, self._quick, self._slow, self._compiling):
            threads.shutdown(cancel_futures=True)


def _put(index: int, found: Mask | str, masks: dict[int, Mask], stuck: dict[int, str]) -> None:
    if isinstance(found, str):
        stuck[index] = found
    else:
        masks[index] = found


def _yield_to_others() -> None:
    """On Linux a thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, get_native_id(), SLOW_NICENESS)


def _without(mask: Mask, banned: Sequence[int]) -> Mask:
    """The mask without the banned tokens, unless nothing else is left."""
    rest = mask.copy()
    for token in banned:
        rest[token // 32] &= ~np.int32(1 << token % 32) if token % 32 < 31 else np.int32(2**31 - 1)
    return rest if banned and rest.any() else mask


def unpacked(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """[vocab]: which tokens are allowed."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
