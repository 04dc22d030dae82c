"""What a placement would give: seconds to the first token, and for each further one. Pure.

Step costs are those of `PoolSpec.cost`. Where nobody gave any, the defaults are corrected by what is seen: decode steps
by the worker's own step time, prompts by the book.
"""

from cluster.policy.book import Book, Work
from cluster.policy.picking import num_sequences, queued_tokens
from cluster.policy.placement import Ask
from cluster.spec import ClusterSpec
from cluster.view import WorkerView
from workers.config import EngineConfig
from workers.costs import CostModel, LinearCost

_MEMORY = 0.1  # weight of the newest prompt in a worker's correction
_BOUND = 100.0  # what is this much off was no measurement
_WHOLE_PROMPTS = ("static", "orca", "prefill-first")  # batching policies that do not cut prompts


class Forecast:
    """Owned by a Policy."""

    def __init__(self, spec: ClusterSpec, book: Book) -> None:
        self._book = book
        self._engines = {pool.name: pool.engine for pool in spec.pools}
        self._no_engine = EngineConfig()
        self._given = {pool.name: pool.cost for pool in spec.pools if pool.cost is not None}
        self._default = LinearCost()
        self._ratios: dict[str, float] = {}  # worker -> seconds a prompt took for each second of the defaults

    def is_sure(self, worker: WorkerView) -> bool:
        """Whether the worker's costs are known, and not guessed."""
        return worker.pool in self._given

    def kv_tokens(self, worker: WorkerView) -> int:
        """How many tokens' KV the worker's pool holds."""
        return worker.stats.total_blocks * self._engine(worker).block_size

    def free_tokens(self, worker: WorkerView) -> int:
        return worker.stats.free_blocks * self._engine(worker).block_size

    def prefill_seconds(self, worker: WorkerView, num_tokens: int, cached_tokens: int) -> float:
        """Computing `num_tokens` of a prompt behind `cached_tokens`, once it is its turn.

        A prompt that is cut costs as many steps, and each of them carries the worker's decodes along.
        """
        engine, cost = self._engine(worker), self._cost(worker)
        steps = 1 if engine.batching in _WHOLE_PROMPTS else -(-num_tokens // engine.max_batch_tokens)
        empty_s = step_s = cost.mixed_seconds((), 0, 0)
        if decodes := self._book.decoding(worker.name):
            step_s = cost.mixed_seconds((), len(decodes), sum(work.num_tokens for work in decodes))
        alone_s = cost.prefill_seconds(num_tokens, cached_tokens) - empty_s
        ratio = 1.0 if self.is_sure(worker) else self._ratios.get(worker.name, 1.0)
        return (alone_s + steps * step_s) * ratio

    def queued_tokens(self, ask: Ask, worker: WorkerView) -> tuple[int, int]:
        """Prompt tokens to compute there: ours, without those that are cached, and those of other gateways."""
        ours = self._book.prefilling(worker.name)
        foreign = queued_tokens(ask, worker) - sum(work.prompt_tokens for work in ours)
        decodes = num_sequences(ask, worker)  # each has one token queued
        return sum(work.new_tokens for work in ours), max(0, foreign - decodes)

    def queue_seconds(self, ask: Ask, worker: WorkerView) -> float:
        """How long the prompts ahead will take: ours by the book, those of other gateways by their tokens."""
        _, foreign = self.queued_tokens(ask, worker)
        foreign_s = self.prefill_seconds(worker, foreign, 0) if foreign else 0.0
        return self._book.ahead_s(worker.name, ask.now_s) + foreign_s

    def ttft_seconds(self, ask: Ask, worker: WorkerView, cached_tokens: int = 0) -> float:
        """From now to the first token, if the prompt is computed there."""
        new_tokens = max(1, ask.request.num_tokens - cached_tokens)
        return self.queue_seconds(ask, worker) + self.prefill_seconds(worker, new_tokens, cached_tokens)

    def transfer_seconds(self, worker: WorkerView, num_tokens: int) -> float:
        """Bringing the KV of so many tokens to the worker, alone on the wire."""
        return self._cost(worker).transfer_seconds(num_tokens * worker.kv_token_bytes)

    def tpot_seconds(self, ask: Ask, worker: WorkerView) -> float:
        """A decode step of the worker once all that were promised a slot decode, this request among them."""
        batch = num_sequences(ask, worker)
        return self.step_seconds(worker, batch + 1, self._used_tokens(worker) + ask.request.num_tokens)

    def tpot_now_seconds(self, ask: Ask, worker: WorkerView) -> float:
        """A decode step of the worker if this request decoded there now."""
        running = worker.stats.running
        used_tokens = self._used_tokens(worker) * running / max(1, running + worker.stats.reserved)
        return self.step_seconds(worker, running + 1, used_tokens + ask.request.num_tokens)

    def step_seconds(self, worker: WorkerView, batch: float, context_tokens: float) -> float:
        """A decode step there with so many sequences; corrected by its latest steps where costs are guessed."""
        cost, stats = self._cost(worker), worker.stats
        seconds = cost.decode_seconds(round(batch), round(context_tokens))
        if self.is_sure(worker) or not (stats.step_s and stats.running):
            return seconds
        return seconds * _bounded(stats.step_s / cost.decode_seconds(stats.running, self._used_tokens(worker)))

    def _used_tokens(self, worker: WorkerView) -> int:
        return self.kv_tokens(worker) - self.free_tokens(worker)

    def learn(self, work: Work) -> None:
        """A prompt was computed: correct the guesses for its worker."""
        if work.prefilled_s is None or work.prefilled_s <= work.turn_s or work.prefill_s <= 0.0:
            return
        known = self._ratios.get(work.prefill)
        seen = _bounded((work.prefilled_s - work.turn_s) / work.prefill_s * (known or 1.0))
        self._ratios[work.prefill] = seen if known is None else known + _MEMORY * (seen - known)

    def _cost(self, worker: WorkerView) -> CostModel:
        return self._given.get(worker.pool, self._default)

    def _engine(self, worker: WorkerView) -> EngineConfig:
        return self._engines.get(worker.pool, self._no_engine)


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _BOUND), _BOUND)
