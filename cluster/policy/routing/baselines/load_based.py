"""Routers that use load only, or nothing: least-loaded, random, round-robin, DistServe."""

from cluster.policy.routing.picking import PerPhaseRouter, Workers, most_room, num_sequences, queued_tokens
from cluster.policy.routing.router import Placement, PlacementRequest
from diptych.view import WorkerView

_MASK = (1 << 64) - 1


class SplitMix64:
    """Random numbers (Steele, Lea and Flood, OOPSLA 2014): the same seed gives the same numbers everywhere."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, bound: int) -> int:
        """Uniform in 0..bound-1; the bias of 2⁻⁶⁴ per value does not matter here."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64


class LeastLoaded(PerPhaseRouter):
    """Prefill to the worker with the fewest prompt tokens queued, decode to the one with the fewest sequences."""

    def pick_prefill(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: (queued_tokens(ask, worker), worker.name))

    def pick_decode(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: most_room(ask, worker))

    def pick_whole(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return min(workers, key=lambda each: (queued_tokens(ask, each), num_sequences(ask, each), each.name))

    @property
    def reason(self) -> str:
        return "least-loaded"


class DistServe(LeastLoaded):
    """The shortest prefill queue, counted in requests; then the least-loaded decode worker.

    Zhong et al., OSDI 2024, section 4.3. There the decode worker is chosen when the prompt is done; here when the
    request arrives, because the decode worker reserves blocks first.
    """

    def pick_prefill(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return min(workers, key=lambda each: (each.stats.waiting + num_sequences(ask, each), each.name))

    @property
    def reason(self) -> str:
        return "shortest prefill queue"


class Random(PerPhaseRouter):
    """Any worker, uniformly."""

    def __init__(self, random_source: SplitMix64) -> None:
        self._random = random_source

    def pick_prefill(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return workers[self._random.below(len(workers))]

    def pick_decode(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return workers[self._random.below(len(workers))]

    @property
    def reason(self) -> str:
        return "random"


class RoundRobin(PerPhaseRouter):
    """Of the workers that fit, the one used longest ago in this phase."""

    def __init__(self) -> None:
        self._turns = 0
        self._prefilled: dict[str, int] = {}  # worker -> number of its last turn
        self._decoded: dict[str, int] = {}

    def pick_prefill(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: self._prefilled.get(worker.name, 0))

    def pick_decode(self, ask: PlacementRequest, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: self._decoded.get(worker.name, 0))

    def began(self, ask: PlacementRequest, placement: Placement) -> None:
        self._turns += 1
        self._prefilled[placement.prefill] = self._decoded[placement.decode] = self._turns

    @property
    def reason(self) -> str:
        return "round-robin"
