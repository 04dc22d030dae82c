"""The candidates of a request when few workers can hold it: all of them. No state beyond one request."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.picking import fitting, prefer_sibling, with_room
from cluster.policy.routing.prefix_index import Match
from cluster.policy.routing.router import PlacementQuery
from cluster.policy.routing.slo.worker_estimate import DECODE, PREFILL, PrefillEstimate
from diptych.view import WorkerView
from workers.request import SLO


class AllWorkers:
    """All workers that can hold the request; those of the phase's role come first. `match`: of a worker's cache."""

    def __init__(self, query: PlacementQuery, match: Callable[[WorkerView], Match], latency: LatencyPredictor) -> None:
        self._query = query
        self._latency = latency
        self.match = match
        self._workers = fitting(query)

    def worker(self, name: str) -> WorkerView:
        return next(worker for worker in self._workers if worker.name == name)

    def prompts(self, slo: SLO, reader: str = "") -> Iterator[list[WorkerView]]:
        workers = prefer_sibling(self._query, self._workers)
        if reader:
            workers = [worker for worker in workers if self._query.view.linked(worker.name, reader)]
        yield [worker for worker in workers if worker.role is not DECODE]
        yield [worker for worker in workers if worker.role is DECODE]

    def available_speed(
        self, slo: SLO, estimates: Sequence[PrefillEstimate], speed_of: Callable[[WorkerView], float]
    ) -> float:
        return sum(speed_of(self.worker(estimate.name)) for estimate in estimates if has_time(estimate))

    def mixed(self, slo: SLO, early: float) -> list[WorkerView]:
        return []  # mixed workers are candidates of both phases anyway

    def decodes(self, *, may_colocate: bool) -> Iterator[list[WorkerView]]:
        yield with_room(self._query, [worker for worker in self._workers if worker.role is not PREFILL])
        if may_colocate:
            yield with_room(self._query, [worker for worker in self._workers if worker.role is PREFILL])

    def prefix_owner(self, own_tokens: int, reader: str) -> tuple[int, str] | None:
        kv_dtype = self._latency.engine(self.worker(reader)).dtype
        most = self._query.request.num_tokens - 1
        owners = [
            (tokens, each.role is not PREFILL, -each.stats.leases, each.name)
            for each in self._workers
            if each.name != reader
            and (tokens := min(self._latency.lendable(each, self.match(each)), most)) > own_tokens
            and self._query.view.linked(each.name, reader)
            and self._latency.engine(each).dtype == kv_dtype
        ]
        if not owners:
            return None
        tokens, _, _, owner = max(owners, key=itemgetter(0, 1, 2))
        return tokens, owner


def has_time(estimate: PrefillEstimate) -> bool:
    return estimate.role is not DECODE and estimate.steps > 0
