"""What most routers share: pick a prefill worker, then one of the decode workers linked to it.

If a pool is empty, a worker of any role does both phases. Subclasses decide how to pick one of several workers.
"""

from abc import abstractmethod
from collections.abc import Sequence

from cluster.policy.routing.router import Placement, PlacementQuery, Router
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView

Workers = Sequence[WorkerView]


class PerPhaseRouter(Router):
    """A router that picks one worker for each phase."""

    @abstractmethod
    def pick_prefill(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        """The worker that computes the prompt; `workers` is not empty."""

    @abstractmethod
    def pick_decode(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        """The worker that decodes; `workers` is not empty."""

    def pick_whole(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        """The worker that does both phases; `workers` is not empty."""
        return self.pick_prefill(query, workers)

    def choose(self, query: PlacementQuery) -> Placement | None:
        by_role: dict[Role, list[WorkerView]] = {role: [] for role in Role}
        for worker in fitting(query):
            by_role[worker.role].append(worker)
        prefills, decodes, mixed = by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.MIXED]
        if query.tokens_left == 1 and (prefills or mixed):
            worker = self.pick_prefill(query, prefer_sibling(query, prefills or mixed))
            return self.placed(query, worker, worker, "one token is requested: no KV handoff")
        while prefills and decodes:
            prefill = self.pick_prefill(query, prefer_sibling(query, prefills))
            if linked := [worker for worker in decodes if query.view.linked(prefill.name, worker.name)]:
                return self.placed(query, prefill, self.pick_decode(query, with_room(query, linked)), self.reason)
            prefills.remove(prefill)
        if mixed:
            worker = self.pick_whole(query, prefer_sibling(query, with_room(query, mixed)))
            return self.placed(query, worker, worker, f"{self.reason}: mixed worker")
        if query.may_colocate and (either := fitting(query)):
            worker = self.pick_whole(query, with_room(query, either))
            return self.placed(query, worker, worker, "no linked pair is ready: one worker does both")
        return None

    def placed(self, query: PlacementQuery, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        """The placement on these two workers, with this router's predictions."""
        return Placement(prefill.name, decode.name, reason)

    @property
    @abstractmethod
    def reason(self) -> str:
        """The router's criterion in a few words, for `Placement.reason`."""


class WorkerLookup:
    """Finds workers of a view by name. Remembers their positions, which change only with the membership."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def __call__(self, view: ClusterView, name: str) -> WorkerView | None:
        workers, place = view.workers, self._places.get(name, -1)
        if 0 <= place < len(workers) and workers[place].name == name:
            return workers[place]
        self._places = {worker.name: place for place, worker in enumerate(workers)}
        place = self._places.get(name, -1)
        return None if place < 0 else workers[place]


def fitting(query: PlacementQuery) -> list[WorkerView]:
    """Ready workers that can hold the request."""
    tokens, avoid, ready = query.request.num_tokens, query.avoid, WorkerState.READY
    return [
        worker
        for worker in query.view.workers
        if worker.state is ready and tokens < worker.capacity_tokens and worker.name not in avoid
    ]


def with_room(query: PlacementQuery, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The workers with room for the longest allowed answer; if there are none, those with the most room."""
    longest = max((worker.capacity_tokens for worker in workers), default=0)
    needed = query.needed_tokens(longest)
    return [worker for worker in workers if worker.capacity_tokens >= needed]


def prefer_sibling(query: PlacementQuery, workers: Workers) -> Workers:
    """Only the worker that computes this prompt for another parallel sample, if it is one of these; else all."""
    return (
        [worker for worker in workers if worker.name == query.sibling_worker] or workers
        if query.sibling_worker
        else workers
    )


def queued_tokens(query: PlacementQuery, worker: WorkerView) -> int:
    """Prompt tokens that the worker still has to compute."""
    return worker.stats.queued_tokens + query.sent_to(worker.name).prompt_tokens


def num_sequences(query: PlacementQuery, worker: WorkerView) -> int:
    """Sequences that decode on the worker or have a slot reserved."""
    return worker.stats.running + worker.stats.reserved + query.sent_to(worker.name).sequences


def most_room(query: PlacementQuery, worker: WorkerView) -> tuple[int, int, str]:
    """Sort key: fewest sequences, then most free blocks."""
    return num_sequences(query, worker), -worker.stats.free_blocks, worker.name
