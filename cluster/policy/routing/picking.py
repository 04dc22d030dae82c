"""The way that most routers share: a prefill worker is picked, then one of the decode workers linked to it.

A pool that is empty for the moment does not stop the service: every worker can do both phases, so a healthy one of any
role serves the request alone. How one of several is picked is all that routers differ in.
"""

from abc import abstractmethod
from collections.abc import Sequence

from cluster.policy.routing.router import Ask, Placement, Router
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView

Workers = Sequence[WorkerView]


class Picking(Router):
    """A router that picks one of several workers for a phase at a time."""

    @abstractmethod
    def pick_prefill(self, ask: Ask, workers: Workers) -> WorkerView:
        """One of at least one workers, to compute the prompt."""

    @abstractmethod
    def pick_decode(self, ask: Ask, workers: Workers) -> WorkerView:
        """One of at least one workers, to decode."""

    def pick_whole(self, ask: Ask, workers: Workers) -> WorkerView:
        """One of at least one workers, to do both phases."""
        return self.pick_prefill(ask, workers)

    def role(self, worker: WorkerView) -> Role:
        """What the worker is for, in this router's eyes."""
        return worker.role

    def choose(self, ask: Ask) -> Placement | None:
        prefills: list[WorkerView] = []
        decodes: list[WorkerView] = []
        mixed: list[WorkerView] = []
        sides = {Role.PREFILL: prefills, Role.DECODE: decodes, Role.MIXED: mixed}
        for worker in fitting(ask):
            sides[self.role(worker)].append(worker)
        if ask.tokens_left == 1 and (prefills or mixed):
            worker = self.pick_prefill(ask, beside(ask, prefills or mixed))
            return self.placed(ask, worker, worker, "one token is wanted: nothing to hand over")
        while prefills and decodes:
            prefill = self.pick_prefill(ask, beside(ask, prefills))
            if linked := [worker for worker in decodes if ask.view.linked(prefill.name, worker.name)]:
                return self.placed(ask, prefill, self.pick_decode(ask, roomy(ask, linked)), self.reason)
            prefills.remove(prefill)
        if mixed:
            worker = self.pick_whole(ask, beside(ask, roomy(ask, mixed)))
            return self.placed(ask, worker, worker, f"{self.reason}: mixed worker")
        if ask.alone and (either := fitting(ask)):
            worker = self.pick_whole(ask, roomy(ask, either))
            return self.placed(ask, worker, worker, "no linked pair is ready: one worker does both")
        return None

    def placed(self, ask: Ask, prefill: WorkerView, decode: WorkerView, reason: str) -> Placement:
        """The placement on these two, with what else this router knows of it."""
        return Placement(prefill.name, decode.name, reason)

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why a pair was taken, in a few words."""


class Finder:
    """Workers of a view by name. Remembers where each one stood: that changes with the membership only."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def __call__(self, view: ClusterView, name: str) -> WorkerView | None:
        workers, place = view.workers, self._places.get(name, -1)
        if 0 <= place < len(workers) and workers[place].name == name:
            return workers[place]
        self._places = {worker.name: place for place, worker in enumerate(workers)}
        place = self._places.get(name, -1)
        return None if place < 0 else workers[place]


def fitting(ask: Ask) -> list[WorkerView]:
    """Ready workers that can hold the request."""
    tokens, avoid, ready = ask.request.num_tokens, ask.avoid, WorkerState.READY
    return [
        worker
        for worker in ask.view.workers
        if worker.state is ready and tokens < worker.capacity_tokens and worker.name not in avoid
    ]


def roomy(ask: Ask, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Of these, those with room for the longest answer it may get; if there are none, those with the most room."""
    longest = max((worker.capacity_tokens for worker in workers), default=0)
    needed = ask.needed_tokens(longest)
    return [worker for worker in workers if worker.capacity_tokens >= needed]


def beside(ask: Ask, workers: Workers) -> Workers:
    """Only the worker that computes this prompt for a sibling, when it is one of these."""
    return [worker for worker in workers if worker.name == ask.beside] or workers if ask.beside else workers


def queued_tokens(ask: Ask, worker: WorkerView) -> int:
    """Prompt tokens that it still has to compute."""
    return worker.stats.queued_tokens + ask.sent_to(worker.name).prompt_tokens


def num_sequences(ask: Ask, worker: WorkerView) -> int:
    """Sequences that decode there, or have a slot reserved."""
    return worker.stats.running + worker.stats.reserved + ask.sent_to(worker.name).sequences


def most_room(ask: Ask, worker: WorkerView) -> tuple[int, int, str]:
    """Sorts by sequences, then free blocks."""
    return num_sequences(ask, worker), -worker.stats.free_blocks, worker.name
