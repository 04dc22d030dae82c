"""Routers that know what workers have cached: Mooncake's, with and without fetching, and the product of LMetric."""

from typing import ClassVar, NamedTuple

from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.baselines.load_based import LeastLoaded
from cluster.policy.routing.picking import Finder, Workers, num_sequences
from cluster.policy.routing.prefix_index import NO_MATCH, Match, PrefixIndex, chain
from cluster.policy.routing.router import Ask, Placement
from cluster.spec import Role
from diptych.view import WorkerView
from workers.request import Request

BALANCING_THRESHOLD = 1.5  # the paper's is tuned by hand and not published


class CacheAware(LeastLoaded):
    """Looks prompts up in the index of prefixes: what workers say they have, and what is on its way there."""

    wants_caches: ClassVar[bool] = True

    def __init__(self, latency: LatencyPredictor, index: PrefixIndex) -> None:
        self.latency = latency
        self._index = index
        self._asked: tuple[Request, float] | None = None
        self._find = Finder()
        self._named: Request | None = None
        self._names: list[int] = []
        self._matches: dict[str, Match] = {}

    def cached_tokens(self, ask: Ask, worker: WorkerView) -> int:
        """How much of the prompt the worker need not compute; at least one token always is."""
        tokens = self.match(ask, worker).tokens
        return min(tokens, ask.request.num_tokens - 1) if tokens else 0

    def match(self, ask: Ask, worker: WorkerView) -> Match:
        """How much of the prompt the worker's cache has, as is believed."""
        if ask.request.fresh:
            return NO_MATCH
        self._look_up(ask)
        match = self._matches.get(worker.name)
        if match is None or not self._index.is_of(worker.name, worker.incarnation):
            return NO_MATCH
        return match

    def _look_up(self, ask: Ask) -> None:
        """All workers at once; of the request asked for last it is kept."""
        if self._asked is not None and self._asked[0] is ask.request and self._asked[1] == ask.now_s:
            return
        self._matches = self._index.matches(self.names(ask), ask.now_s)
        self._asked = ask.request, ask.now_s

    def names(self, ask: Ask) -> list[int]:
        """Those of the prompt's beginnings; of the request asked for last they are kept."""
        request = ask.request
        if self._named is not request:
            tokens = (*request.prompt, *request.generated) if request.generated else request.prompt
            self._names = chain(tokens, self._index.grain, salt=request.cache_salt)
            self._named = request
        return self._names

    def placed(self, ask: Ask, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        return Placement(prefill.name, decode.name, reason, cached_tokens=self.cached_tokens(ask, prefill))

    def began(self, ask: Ask, placement: Placement) -> None:
        worker = self._find(ask.view, placement.prefill)
        if worker is not None:
            names, believed = self.names(ask), placement.cached_tokens
            self._index.expect(ask.request.key, worker.name, worker.incarnation, names, believed)
        self._asked = None  # the next lookup sees it


class Way(NamedTuple):
    """How a worker would come to the first token: with so much of the prompt from its cache, or from its owner's."""

    ttft_s: float
    cached_tokens: int
    prefix_owner: str = ""


class MooncakeLocal(CacheAware):
    """Prefill where the first token is expected soonest: the queue there, and what its cache does not have.

    Qin et al., Mooncake (FAST 2025), algorithm 1 without fetching from other workers. Decode where a step is expected
    to be shortest.
    """

    def pick_prefill(self, ask: Ask, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: self._preference(self._way(ask, worker), worker))

    @staticmethod
    def _preference(way: Way, worker: WorkerView) -> tuple[float, str, str]:
        """The sooner the better; of what is equally soon, to the microsecond, what moves nothing."""
        return round(way.ttft_s, 6), way.prefix_owner, worker.name

    def pick_decode(self, ask: Ask, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: (self.latency.tpot_seconds(ask, worker), worker.name))

    def pick_whole(self, ask: Ask, workers: Workers) -> WorkerView:
        return self.pick_prefill(ask, workers)

    def placed(self, ask: Ask, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        _, cached_tokens, prefix_owner = self._way(ask, prefill)
        reason = "the first token is expected soonest with a prefix fetched" if prefix_owner else reason
        return Placement(prefill.name, decode.name, reason, cached_tokens=cached_tokens, prefix_owner=prefix_owner)

    def _way(self, ask: Ask, worker: WorkerView) -> Way:
        cached = self.cached_tokens(ask, worker)
        return Way(self.latency.ttft_seconds(ask, worker, cached), cached)

    @property
    def reason(self) -> str:
        return "first token expected soonest"


class Mooncake(MooncakeLocal):
    """Also fetches: the longest beginning that any worker has may be brought to where the queue is shorter.

    Worth a thought where it is more than `threshold` times what the worker itself has; done where the first token is
    then expected sooner. What is fetched stays there too: this is how hot prefixes spread.
    """

    links_all: ClassVar[bool] = True

    def __init__(self, latency: LatencyPredictor, index: PrefixIndex, threshold: float = BALANCING_THRESHOLD) -> None:
        super().__init__(latency, index)
        self._threshold = threshold
        self._owners: list[tuple[int, str]] = []  # of the request asked for last: cached tokens, worker; most first

    def choose(self, ask: Ask) -> Placement | None:
        """Look up once what each prefill worker has: only what they hold for readers is digested, and can be lent."""
        most = ask.request.num_tokens - 1
        ready = ask.view.ready(Role.PREFILL)  # a prefix is lent from the device only
        owners = ((min(self.match(ask, worker).ready_tokens, most), worker.name) for worker in ready)
        self._owners = sorted((each for each in owners if each[0] and each[1] not in ask.avoid), reverse=True)
        return super().choose(ask)

    def _way(self, ask: Ask, worker: WorkerView) -> Way:
        local = super()._way(ask, worker)
        for cached, owner in self._owners:
            if cached <= local.cached_tokens * self._threshold:
                break
            if owner != worker.name and ask.view.linked(owner, worker.name):
                saved_s = self._saved_seconds(ask, worker, local.cached_tokens, cached)
                return Way(local.ttft_s - saved_s, cached, owner) if saved_s > 0.0 else local
        return local

    def _saved_seconds(self, ask: Ask, worker: WorkerView, own_tokens: int, fetched_tokens: int) -> float:
        """How much sooner the prompt is done with the fetched prefix, its way here counted."""
        num_tokens, latency = ask.request.num_tokens, self.latency
        computing_s = latency.prefill_seconds(worker, num_tokens - own_tokens, own_tokens)
        rest_s = latency.prefill_seconds(worker, num_tokens - fetched_tokens, fetched_tokens)
        return computing_s - rest_s - latency.transfer_seconds(worker, fetched_tokens - own_tokens)


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
        new_tokens = sum(self.latency.queued_tokens(ask, worker)) + ask.request.num_tokens
        batch = num_sequences(ask, worker) + worker.stats.waiting
        return (new_tokens - self.cached_tokens(ask, worker)) * (batch + 1)

    @property
    def reason(self) -> str:
        return "least tokens times sequences"
