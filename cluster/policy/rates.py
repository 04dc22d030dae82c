"""A pool's costs as tables, for estimates of many workers at once. Knows no worker."""

import math

import numpy as np
import numpy.typing as npt

from cluster.policy.forecast import APART, WHOLE_PROMPTS
from workers.config import EngineConfig
from workers.costs import CostModel
from workers.engine.batching import Adaptive

Floats = npt.NDArray[np.float64]

TOP_BATCH = 2048  # sequences: more count as this many
_BATCHES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, TOP_BATCH)
_CONTEXTS = (128, 2048)  # tokens of a sequence, between which a step's time is taken to be linear
_PROMPTS = tuple(1 << power for power in range(0, 21, 2))


class Rates:
    """Seconds of steps as `cost` says; a decode step of a batch takes `decode_base_s` + tokens * `decode_token_s`.

    Exact for costs that are linear. How prompts are cut is the engine's batching, about.
    """

    def __init__(self, cost: CostModel, engine: EngineConfig) -> None:
        self._cost = cost
        self._engine = engine
        self.block_size = engine.block_size
        self.is_cutting = engine.batching not in WHOLE_PROMPTS
        self.is_carrying = engine.batching not in APART  # steps with prompts carry decodes along
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
        self._prompts_s = [cost.prefill_seconds(tokens) for tokens in _PROMPTS]

    def bound_s(self, tpot_slo_s: float | None) -> float:
        """What a step with prompts may take, where decodes were promised so much."""
        if not self.is_cutting:
            return math.inf
        bounds = [each for each in (tpot_slo_s, self._engine.tpot_slo_s) if each is not None]
        return min(bounds, default=math.inf) * (Adaptive.MARGIN if self._engine.batching == "adaptive" else 1.0)

    def prompts_seconds(self, num_tokens: Floats) -> Floats:
        """Computing so many tokens of prompts, in one step each."""
        seconds: Floats = np.interp(num_tokens, _PROMPTS, self._prompts_s)
        return seconds

    def prompt_parabola(self, num_tokens: int, most_cached: int) -> tuple[float, float, float]:
        """(a, b, c): a prompt of which x tokens are cached, `most_cached` at most, takes a + b x + c x² seconds."""
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
        steps = math.ceil(new_tokens / self.most_tokens) or 1
        return self._cost.prefill_seconds(new_tokens, cached_tokens) + (steps - 1) * self.empty_s
