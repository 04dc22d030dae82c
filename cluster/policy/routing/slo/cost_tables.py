"""A pool's costs as tables, for estimates of many workers at once. Knows no worker."""

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.policy.estimate.latency import APART, MIN_CHUNK, WHOLE_PROMPTS
from cluster.policy.routing.slo.worker_estimate import MAX_FULL
from workers.config import ADAPTIVE_MARGIN, MISSED_SLO_SLOWDOWN, EngineConfig
from workers.costs import CostModel

Floats = npt.NDArray[np.float64]

TOP_BATCH = 2048  # sequences; more count as this many
_BATCHES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, TOP_BATCH)
_CONTEXTS = (128, 2048)  # tokens of a sequence; step times are interpolated linearly between them
_PROMPTS = tuple(1 << power for power in range(0, 21, 2))


class ReportedLoad(NamedTuple):
    """A worker's load by its statistics and what was sent since: sequences, prompt tokens, and blocks."""

    seen: float
    queued_tokens: float
    total_blocks: float
    free_blocks: float
    step_ratio: float


class OwnLoad(NamedTuple):
    """A worker's load by our active requests: all that decode there or will, those that do, and waiting prompts.

    `num_tokens` and `context_tokens`: with the whole answers, and with half of each. `requests`: waiting ones too.
    """

    sequences: float
    prompt_tokens: float
    num_tokens: float
    context_tokens: float
    begun: float
    begun_context_tokens: float
    requests: float
    waiting_tokens: float
    until_s: float
    rest_s: float
    prompt_ratio: float


class PromptSettings(NamedTuple):
    """What decides how a pool computes prompts, for each row: seconds, tokens and sequences."""

    empty_s: Floats
    most_tokens: Floats
    has_mixed_steps: Floats  # 1: yes
    block_size: Floats
    first: Floats  # of the pool's step times in the tables of all pools


class CostColumns:
    """Step times of `cost` as tables: a decode step of a batch takes `decode_base_s` + tokens * `decode_token_s`.

    Exact for linear costs. Prompt chunks are approximately those of the engine's batching policy.
    """

    def __init__(self, cost: CostModel, engine: EngineConfig) -> None:
        self._cost = cost
        self._engine = engine
        self.block_size = engine.block_size
        self.kv_dtype = engine.dtype
        self.is_cutting = engine.batching not in WHOLE_PROMPTS
        self.has_mixed_steps = engine.batching not in APART  # steps with prompts have decodes too
        self.most_tokens = float(engine.max_batch_tokens) if self.is_cutting else math.inf  # of a prompt in one step
        self.empty_s = cost.mixed_seconds((), 0, 0)
        bases, slopes = [self.empty_s], [cost.mixed_seconds((), 0, 1) - self.empty_s]
        for batch in _BATCHES[1:]:
            near, far = (batch * context for context in _CONTEXTS)
            near_s = cost.decode_seconds(batch, near)
            slopes.append((cost.decode_seconds(batch, far) - near_s) / (far - near))
            bases.append(near_s - slopes[-1] * near)
        every = np.arange(TOP_BATCH + 1)
        self.decode_base_s: Floats = np.interp(every, _BATCHES, bases)
        self.decode_token_s: Floats = np.interp(every, _BATCHES, slopes)
        self._bases_s: list[float] = self.decode_base_s.tolist()
        self._tokens_s: list[float] = self.decode_token_s.tolist()
        self._prompts_s = [cost.prefill_seconds(tokens) for tokens in _PROMPTS]
        self._prompts = np.array(_PROMPTS, dtype=np.float64), np.array(self._prompts_s)

    @property
    def settings(self) -> tuple[float, ...]:
        """In the order of `PromptSettings`, without `first`."""
        return self.empty_s, self.most_tokens, self.has_mixed_steps, self.block_size

    def is_of(self, cost: CostModel, engine: EngineConfig) -> bool:
        return self._cost == cost and self._engine == engine

    def bound_s(self, tpot_slo_s: float | None) -> float:
        """Longest step with prompts beside decodes with this SLO."""
        if not self.is_cutting:
            return math.inf
        bounds = [each for each in (tpot_slo_s, self._engine.tpot_slo_s) if each is not None]
        return min(bounds, default=math.inf) * (ADAPTIVE_MARGIN if self._engine.batching == "adaptive" else 1.0)

    def prompts_seconds(self, num_tokens: Floats) -> Floats:
        """Seconds to compute prompts of this many tokens, in one step each."""
        seconds: Floats = np.interp(num_tokens, *self._prompts)
        return seconds

    def row(self, reported: tuple[float, ...], own: tuple[float, ...], bound_s: float) -> tuple[float, ...]:
        """One worker's values, in the order of the table's columns; the same bits as `WorkerTable._derive`.

        `reported` and `own` as `ReportedLoad` and `OwnLoad`; `bound_s`: longest step with prompts.
        """
        seen, queued, total, free, step_ratio = reported
        ours, prompts, num_tokens, context_tokens, begun, begun_context = own[:6]
        requests, waiting_tokens, until_s, rest_s, ratio = own[6:]
        kv_tokens = total * self.block_size
        foreign = max(seen - requests, 0)
        theirs = max(kv_tokens - free * self.block_size - prompts, 0) if foreign else 0
        batch = begun + foreign
        at = int(min(batch, TOP_BATCH - 1))
        step_s = ratio * (self._bases_s[at] + self._tokens_s[at] * (begun_context + theirs))
        at = int(min(ours + foreign, TOP_BATCH - 1)) + 1
        token_s = step_ratio * self._tokens_s[at]
        tpot_s = step_ratio * self._bases_s[at] + token_s * (context_tokens + theirs)
        room_tokens = kv_tokens - num_tokens - theirs - (1 - MAX_FULL) * kv_tokens
        queue, foreign_s = max(queued - waiting_tokens, 0) - seen, 0.0
        if queue > 0:
            foreign_s = self._queue_seconds(queue, batch, step_s, ratio, bound_s)
        return until_s, rest_s, ratio, batch, room_tokens, step_s, tpot_s, token_s, foreign_s

    def _queue_seconds(self, tokens: float, batch: float, step_s: float, ratio: float, bound_s: float) -> float:
        """Seconds of queued prompts with this many tokens, beside this many decodes."""
        work_s = (self._prompts_seconds(tokens) - self.empty_s) * ratio
        most, each_s = max(self.most_tokens - batch, 1.0), self.empty_s * ratio
        if batch and self.has_mixed_steps:
            token_s = max(work_s, 1e-12) / tokens
            chunk, each_s, least = (bound_s - step_s) / token_s, step_s, min(MIN_CHUNK, tokens)
            if chunk < least:
                chunk = (bound_s * ratio - step_s) / token_s  # costs as given
            if chunk < least:
                chunk = max((MISSED_SLO_SLOWDOWN - 1) * step_s / token_s, MIN_CHUNK)
            most = min(most, chunk)
        return work_s + math.ceil(tokens / min(most, tokens)) * each_s

    def _prompts_seconds(self, num_tokens: float) -> float:
        """`prompts_seconds` of one number."""
        place = bisect_right(_PROMPTS, num_tokens)
        if place == 0 or place == len(_PROMPTS):
            return self._prompts_s[place - 1 if place else 0]
        before, after, begin = self._prompts_s[place - 1], self._prompts_s[place], _PROMPTS[place - 1]
        return (after - before) / (_PROMPTS[place] - begin) * (num_tokens - begin) + before

    def prompt_parabola(self, num_tokens: int, most_cached: int) -> tuple[float, float, float]:
        """(a, b, c): a prompt with x cached tokens, at most `most_cached`, takes about a + b x + c x² seconds."""
        nothing_s = self._seconds(num_tokens, 0)
        if not most_cached:
            return nothing_s, 0.0, 0.0
        most_s = self._seconds(num_tokens, most_cached) - nothing_s
        if (half := most_cached // 2) == 0:
            return nothing_s, most_s / most_cached, 0.0
        half_s = self._seconds(num_tokens, half) - nothing_s
        square = (most_s / most_cached - half_s / half) / (most_cached - half)
        return nothing_s, most_s / most_cached - square * most_cached, square

    def _seconds(self, num_tokens: int, cached_tokens: int) -> float:
        new_tokens = num_tokens - cached_tokens
        seconds = self._cost.prefill_seconds(new_tokens, cached_tokens)
        more_steps = math.ceil(new_tokens / self.most_tokens) - 1 if new_tokens > self.most_tokens else 0
        return seconds + more_steps * self.empty_s
