"""Routers that use the prefix index: Mooncake's, with and without prefix fetches."""

from typing import ClassVar, NamedTuple

from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.baselines import LeastLoaded
from cluster.policy.routing.picking import WorkerLookup, Workers, fitting
from cluster.policy.routing.prefix_index import NO_MATCH, Match, PrefixIndex, prefix_hashes
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import Role
from diptych.view import WorkerView
from workers.request import Request

BALANCING_THRESHOLD = 1.5  # the paper's is tuned by hand and not published


def prompt_of(request: Request) -> tuple[int, ...]:
    """The tokens whose KV the request needs: a later attempt continues behind the tokens of the earlier ones."""
    return (*request.prompt, *request.generated) if request.generated else request.prompt


class CacheAware(LeastLoaded):
    """Looks prompts up in the prefix index: what workers reported, and what this gateway sent them."""

    uses_prefix_index: ClassVar[bool] = True

    def __init__(self, latency: LatencyPredictor, index: PrefixIndex) -> None:
        self.latency = latency
        self._index = index
        self._asked: tuple[Request, float] | None = None
        self._find = WorkerLookup()
        self._named: Request | None = None
        self._hashes: list[int] = []
        self._matches: dict[str, Match] = {}

    def cached_tokens(self, query: PlacementQuery, worker: WorkerView) -> int:
        """Prompt tokens the worker need not compute; at least one is always computed."""
        return self.found(query, worker)[0]

    def found(self, query: PlacementQuery, worker: WorkerView) -> tuple[int, float]:
        """The same, and the seconds to bring them to the device."""
        match = self.match(query, worker)
        return self.latency.found(worker, match, query.request.num_tokens) if match.tokens else (0, 0.0)

    def match(self, query: PlacementQuery, worker: WorkerView) -> Match:
        """What the worker's cache has of the prompt, as far as known."""
        if query.request.fresh:
            return NO_MATCH
        self._look_up(query)
        match = self._matches.get(worker.name)
        if match is None or not self._index.is_of(worker.name, worker.incarnation):
            return NO_MATCH
        return match

    def _look_up(self, query: PlacementQuery) -> None:
        """Look up all workers at once; the latest request is cached."""
        if self._asked is not None and self._asked[0] is query.request and self._asked[1] == query.now_s:
            return
        self._matches = self._index.matches(self.hashes(query), query.now_s, prompt_of(query.request))
        self._asked = query.request, query.now_s

    def hashes(self, query: PlacementQuery) -> list[int]:
        """Hashes of the prompt's prefixes; the latest request is cached."""
        request = query.request
        if self._named is not request:
            self._hashes = prefix_hashes(prompt_of(request), self._index.block_size, salt=request.cache_salt)
            self._named = request
        return self._hashes

    def placed(self, query: PlacementQuery, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        return Placement(prefill.name, decode.name, reason, cached_tokens=self.cached_tokens(query, prefill))

    def began(self, query: PlacementQuery, placement: Placement) -> None:
        worker = self._find(query.view, placement.prefill)
        if worker is not None:
            self._index.expect(query.request.key, worker.name, worker.incarnation, self.hashes(query))
        self._asked = None  # the next lookup sees it


class _Prefill(NamedTuple):
    """A possible prefill: its TTFT with `cached_tokens` from the worker's cache, or fetched from `prefix_owner`."""

    ttft_s: float
    cached_tokens: int
    prefix_owner: str = ""


class MooncakeLocal(CacheAware):
    """Prefill where the first token is expected soonest, given the queue and what is not cached.

    Qin et al., Mooncake (FAST 2025), algorithm 1 without fetching from other workers. Decode where a step is expected
    to be shortest.
    """

    def pick_prefill(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: self._preference(self._prefill(query, worker), worker))

    @staticmethod
    def _preference(option: _Prefill, worker: WorkerView) -> tuple[float, str, str]:
        """Sort key: soonest, to the microsecond; then without a fetch."""
        return round(option.ttft_s, 6), option.prefix_owner, worker.name

    def pick_decode(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: (self.latency.tpot_seconds(query, worker), worker.name))

    def pick_whole(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return self.pick_prefill(query, workers)

    def placed(self, query: PlacementQuery, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        _, cached_tokens, prefix_owner = self._prefill(query, prefill)
        reason = "the first token is expected soonest with a prefix fetched" if prefix_owner else reason
        return Placement(prefill.name, decode.name, reason, cached_tokens=cached_tokens, prefix_owner=prefix_owner)

    def _prefill(self, query: PlacementQuery, worker: WorkerView) -> _Prefill:
        cached, restore_s = self.found(query, worker)
        return _Prefill(self.latency.ttft_seconds(query, worker, cached) + restore_s, cached)

    @property
    def reason(self) -> str:
        return "first token expected soonest"


class Mooncake(MooncakeLocal):
    """Also fetches prefixes from other workers to where the queue is shorter.

    Considered where another worker has more than `BALANCING_THRESHOLD` times what the worker itself has; done where the
    first token then comes sooner. The fetched prefix stays in the cache, so hot prefixes spread.
    """

    links_all: ClassVar[bool] = True

    def __init__(self, latency: LatencyPredictor, index: PrefixIndex) -> None:
        super().__init__(latency, index)
        self._owners: list[tuple[int, WorkerView]] = []  # of the latest request: cached tokens, worker; most first

    def choose(self, query: PlacementQuery) -> Placement | None:
        """Look up once what each worker has. Of equals none for prefill: it may have the answer to an earlier prompt
        too, which hashes show only in part. Then the one with the fewest readers.
        """
        most = query.request.num_tokens - 1
        owners = ((min(self.latency.lendable(each, self.match(query, each)), most), each) for each in fitting(query))
        self._owners = sorted(
            ((tokens, each) for tokens, each in owners if tokens),
            key=lambda owner: (-owner[0], owner[1].role is Role.PREFILL, owner[1].stats.leases, owner[1].name),
        )
        return super().choose(query)

    def _prefill(self, query: PlacementQuery, worker: WorkerView) -> _Prefill:
        local = super()._prefill(query, worker)
        for cached, owner in self._owners:
            if cached <= local.cached_tokens * BALANCING_THRESHOLD:
                break
            is_alike = self.latency.engine(owner).dtype == self.latency.engine(worker).dtype
            if owner.name != worker.name and is_alike and query.view.linked(owner.name, worker.name):
                saved_s = self._saved_seconds(query, worker, owner, cached)
                return _Prefill(local.ttft_s - saved_s, cached, owner.name) if saved_s > 0.0 else local
        return local

    def _saved_seconds(
        self, query: PlacementQuery, worker: WorkerView, owner: WorkerView, fetched_tokens: int
    ) -> float:
        """How much sooner the prompt is done with the fetched prefix, transfer included."""
        num_tokens, latency = query.request.num_tokens, self.latency
        own_tokens, restore_s = self.found(query, worker)
        here = self.match(query, worker)
        computing_s = latency.prefill_seconds(worker, num_tokens - own_tokens, own_tokens) + restore_s
        rest_s = latency.prefill_seconds(worker, num_tokens - fetched_tokens, fetched_tokens)
        lending_s = latency.lent_seconds(owner, self.match(query, owner), here, fetched_tokens)
        moving_s = latency.transfer_seconds(worker, fetched_tokens - here.ready_tokens)
        return computing_s - rest_s - lending_s - moving_s
