"""The tokens that grammars allow, for the rank that samples: one packed mask for each sequence with a grammar.

    plan arrives ──> begin: a thread brings each matcher up to date and computes its mask ┐
                └──> the compute thread runs the model ──> logits ────────────────────────┴──> sampler

A matcher is found by its sequence's key. One that is missing, or does not fit the answer's tokens, is made anew from
these tokens; nothing else is ever needed, so matchers may be dropped at any time.

Where only one text can follow, the next token is the first one of that text as the tokenizer writes it. This holds
however the answer got there, so tokens that are forced behind a sampled one need not be sampled.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
MAX_FORCED_READ = 4096  # tokens of forced texts that are read for these: each time the whole text, 0.6 us a token

Mask = NDArray[np.int32]  # [vocab / 32]: bit i of word w is token 32 * w + i
Allowed = Mapping[int, Mask]  # of a row of logits; rows without a grammar are missing


@dataclass(slots=True)
class _Running:
    grammar: Grammar
    matcher: "LLMatcher"
    answer: bytes  # the tokens that it has seen

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.matcher.is_stopped():  # only end tokens may follow, with `ignore_eos`
                break
            self.matcher.consume_token(token)
        self.answer += np.array(tokens, np.int32).tobytes()

    def forced(self) -> Sequence[int]:
        """The text that must follow, if there is only one. Of its tokens only the first is certain."""
        if self.matcher.is_stopped() or self.matcher.is_error():
            return ()
        forced: Sequence[int] = self.matcher.compute_ff_tokens()
        return forced


@dataclass(frozen=True, slots=True)
class StepMasks:
    """By the index of the chunk: the mask, or why there is none.

    `jumping`: of answers that need no log probabilities, so that forced tokens need no sample.
    """

    masks: Mapping[int, Mask]
    stuck: Mapping[int, str]
    jumping: Mapping[int, _Running]

    def forced(self, sampled: Sequence[int | None]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What must follow these tokens, one for each chunk: pairs (index of the chunk, tokens)."""
        pairs = ((index, self._behind(running, sampled[index])) for index, running in self.jumping.items())
        return tuple((index, tokens) for index, tokens in pairs if tokens)

    def _behind(self, running: _Running, sampled: int | None) -> tuple[int, ...]:
        if sampled is None:
            return ()
        running.consume((sampled,))
        tokens: list[int] = []
        read = 0
        while len(tokens) < MAX_FORCED and read < MAX_FORCED_READ and (text := running.forced()):
            running.consume(text[:1])
            tokens.append(text[0])
            read += len(text)
        return tuple(tokens)


NO_MASKS = StepMasks({}, {}, {})


class GrammarMasks:
    """Owned by a `Rank`; `close` ends its threads. `num_threads` compute masks; one more compiles."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, num_threads: int) -> None:
        from llguidance import LLExecutor

        self._compiler = compiler
        self._num_words = -(-vocab_size // 32)
        self._matchers: OrderedDict[str, _Running] = OrderedDict()
        self._parallel = LLExecutor(num_threads=num_threads)
        self._masking = ThreadPoolExecutor(1, "grammar-masks")
        self._compiling = ThreadPoolExecutor(1, "grammars")

    def prepare(self, grammar: Grammar) -> "Future[None]":
        """Compile a grammar on a thread of its own. Raises `InvalidRequest`."""
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
        from llguidance.numpy import fill_next_token_bitmask_par

        stuck: dict[int, str] = {}
        masks: dict[int, Mask] = {}
        jumping: dict[int, _Running] = {}
        free: list[tuple[int, LLMatcher, Draw]] = []
        for index, chunk, draw, grammar in wanted:
            try:
                running = self._running(chunk.key, grammar, draw.answer)
            except InvalidRequest as error:
                stuck[index] = error.message
                continue
            if draw.params.logprobs is None:
                jumping[index] = running
            if text := running.forced():
                masks[index] = self._only(text[0])
            else:
                free.append((index, running.matcher, draw))
        words = np.zeros((len(free), self._num_words), np.int32)
        if free:
            fill_next_token_bitmask_par(self._parallel, [(each[1], row) for row, each in enumerate(free)], words)
        for (index, matcher, draw), mask in zip(free, words, strict=True):
            if matcher.is_error():
                stuck[index] = reason(matcher)
            elif not mask.any():
                stuck[index] = "it allows no token"
            else:
                masks[index] = _without(mask, draw.banned)
        return StepMasks(masks, stuck, jumping)

    def _only(self, token: int) -> Mask:
        mask = np.zeros(self._num_words, np.int32)
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        return mask

    def _running(self, key: str, grammar: Grammar, answer: bytes) -> _Running:
        """The sequence's matcher behind these tokens. Raises `InvalidRequest`."""
        running = self._matchers.pop(key, None)
        if running is None or running.grammar != grammar or not answer.startswith(running.answer):
            running = _Running(grammar, self._compiler.matcher(grammar), b"")
        running.consume(np.frombuffer(answer[len(running.answer) :], np.int32).tolist())
        self._matchers[key] = running
        while len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return running

    def close(self) -> None:
        self._masking.shutdown()
        self._compiling.shutdown()


def _without(mask: Mask, banned: Sequence[int]) -> Mask:
    """The mask without the banned tokens, unless nothing else is left."""
    rest = mask.copy()
    for token in banned:
        rest[token // 32] &= ~np.int32(1 << token % 32) if token % 32 < 31 else np.int32(2**31 - 1)
    return rest if banned and rest.any() else mask


def unpacked(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """[vocab]: which tokens are allowed."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
