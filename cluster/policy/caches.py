"""Routers that know what workers have cached: Mooncake's, with and without fetching, and the product of LMetric."""

import math
from dataclasses import replace
from typing import ClassVar

from cluster.policy.forecast import Forecast
from cluster.policy.loads import LeastLoaded
from cluster.policy.picking import Workers, num_sequences
from cluster.policy.placement import Ask, Placement
from cluster.policy.prefix_index import PrefixIndex, chain
from cluster.spec import Role
from cluster.view import WorkerView
from workers.request import Request

BALANCING_THRESHOLD = 1.5  # the paper's is tuned by hand and not told


class CacheAware(LeastLoaded):
    """Keeps an index of prefixes: a prompt is in its prefill worker's cache from when it is sent there."""

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self._index = PrefixIndex()
        self._request: Request | None = None
        self._names: list[int] = []

    def names(self, request: Request) -> list[int]:
        """The request's chain; of the request asked for last it is kept."""
        if request is not self._request:
            self._request, self._names = request, chain(request.prompt, self._index.block_tokens)
        return self._names

    def cached_tokens(self, ask: Ask, worker: WorkerView) -> int:
        """How much of the prompt the worker need not compute; at least one token always is."""
        if ask.request.fresh:
            return 0
        cached = self._index.cached_tokens(worker.name, worker.incarnation, self.names(ask.request))
        return min(cached, ask.request.num_tokens - 1)

    def placed(self, ask: Ask, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        return Placement(prefill.name, decode.name, reason, cached_tokens=self.cached_tokens(ask, prefill))

    def began(self, ask: Ask, placement: Placement) -> None:
        for worker in ask.view.workers:
            if worker.name == placement.prefill:
                capacity_tokens = self.forecast.kv_tokens(worker)
                self._index.use(worker.name, worker.incarnation, self.names(ask.request), capacity_tokens)


class MooncakeLocal(CacheAware):
    """Prefill where the first token is expected soonest: the queue there, and what its cache does not have.

    Qin et al., Mooncake (FAST 2025), algorithm 1 without fetching from other workers. Decode where a step is expected
    to be shortest.
    """

    def pick_prefill(self, ask: Ask, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: (self._ttft_seconds(ask, worker), worker.name))

    def pick_decode(self, ask: Ask, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: (self.forecast.tpot_seconds(ask, worker), worker.name))

    def pick_whole(self, ask: Ask, workers: Workers) -> WorkerView:
        return self.pick_prefill(ask, workers)

    def _ttft_seconds(self, ask: Ask, worker: WorkerView) -> float:
        return self.forecast.ttft_seconds(ask, worker, self.cached_tokens(ask, worker))

    @property
    def reason(self) -> str:
        return "first token expected soonest"


class Mooncake(MooncakeLocal):
    """Also fetches: the longest beginning that any worker has may be brought to where the queue is shorter.

    Worth a thought where it is more than `threshold` times what the worker itself has; done where the first token is
    then expected sooner. What is fetched stays there too: this is how hot prefixes spread.
    """

    links_all: ClassVar[bool] = True

    def __init__(self, forecast: Forecast, threshold: float = BALANCING_THRESHOLD) -> None:
        super().__init__(forecast)
        self._threshold = threshold
        self._owners: list[tuple[int, str]] = []  # of the request asked for last: cached tokens, worker; most first

    def choose(self, ask: Ask) -> Placement | None:
        """Look up once what each worker has."""
        owners = ((self.cached_tokens(ask, worker), worker.name) for worker in ask.view.ready(*Role))
        self._owners = sorted((each for each in owners if each[0] and each[1] not in ask.avoid), reverse=True)
        return super().choose(ask)

    def placed(self, ask: Ask, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        placement = super().placed(ask, prefill, decode, reason)
        fetched, lender = self._to_fetch(ask, prefill)
        if not lender or self._fetching_seconds(ask, prefill) >= super()._ttft_seconds(ask, prefill):
            return placement
        return replace(placement, cached_tokens=fetched, lender=lender, reason="fetching a prefix pays")

    def _ttft_seconds(self, ask: Ask, worker: WorkerView) -> float:
        return min(super()._ttft_seconds(ask, worker), self._fetching_seconds(ask, worker))

    def _fetching_seconds(self, ask: Ask, worker: WorkerView) -> float:
        fetched, lender = self._to_fetch(ask, worker)
        if not lender:
            return math.inf
        missing = fetched - self.cached_tokens(ask, worker)
        return self.forecast.transfer_seconds(worker, missing) + self.forecast.ttft_seconds(ask, worker, fetched)

    def _to_fetch(self, ask: Ask, worker: WorkerView) -> tuple[int, str]:
        """The longest beginning that could be brought there, in tokens, and who has it; nobody: 0 and ""."""
        own = self.cached_tokens(ask, worker)
        for cached, owner in self._owners:
            if cached <= own * self._threshold:
                break
            if owner != worker.name and ask.view.linked(owner, worker.name):
                return cached, owner
        return 0, ""


class Product(CacheAware):
    """The smallest product of prompt tokens to compute there and sequences there, this request counted in.

    LMetric (OSDI 2026): weighs caches against load without a weight to tune. Between decode workers, which compute no
    prompts, the sequences decide.
    """

    def pick_prefill(self, ask: Ask, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: (self._product(ask, worker), worker.name))

    def pick_whole(self, ask: Ask, workers: Workers) -> WorkerView:
        return self.pick_prefill(ask, workers)

    def _product(self, ask: Ask, worker: WorkerView) -> int:
        new_tokens = sum(self.forecast.queued_tokens(ask, worker)) + ask.request.num_tokens
        batch = num_sequences(ask, worker) + worker.stats.waiting
        return (new_tokens - self.cached_tokens(ask, worker)) * (batch + 1)

    @property
    def reason(self) -> str:
        return "least tokens times sequences"
