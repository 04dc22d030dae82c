"""Routers of the literature and of other systems, to compare with, that know no caches.

Least-loaded, random, round-robin, DistServe, and Splitwise: pools of prompt, token and mixed machines. Both machines of
a request are chosen at its arrival (Patel et al., ISCA 2024, section 4.3, with the overflow order of its simulator):

    prompt   home pool, unless its queue is long ──> mixed pool, unless long ──> a token machine   } becomes mixed
    tokens   home pool, unless its memory is full ─> mixed pool, unless full ─> a prompt machine   }
    neither  both phases on the machine with the fewest pending tokens

A machine keeps its home pool, and counts as mixed while it has work of the other phase.
"""

from typing import ClassVar

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.estimate.lengths import longest_answer
from cluster.policy.routing.picking import (
    PerPhaseRouter,
    Workers,
    fitting,
    most_room,
    num_sequences,
    queued_tokens,
    with_room,
)
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import Role
from diptych.view import WorkerView

_MASK = (1 << 64) - 1
QUEUE_TOKENS = 8192  # the released simulator's prompt_max_pending_batch_tokens


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

    def pick_prefill(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: (queued_tokens(query, worker), worker.name))

    def pick_decode(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: most_room(query, worker))

    def pick_whole(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda each: (queued_tokens(query, each), num_sequences(query, each), each.name))

    @property
    def reason(self) -> str:
        return "least-loaded"


class DistServe(LeastLoaded):
    """The shortest prefill queue, counted in requests; then the least-loaded decode worker.

    Zhong et al., OSDI 2024, section 4.3. There the decode worker is chosen when the prompt is done; here when the
    request arrives, because the decode worker reserves blocks first.
    """

    def pick_prefill(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda each: (each.stats.waiting + num_sequences(query, each), each.name))

    @property
    def reason(self) -> str:
        return "shortest prefill queue"


class Random(PerPhaseRouter):
    """Any worker, uniformly."""

    def __init__(self, random_source: SplitMix64) -> None:
        self._random = random_source

    def pick_prefill(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return workers[self._random.below(len(workers))]

    def pick_decode(self, query: PlacementQuery, workers: Workers) -> WorkerView:
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

    def pick_prefill(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: self._prefilled.get(worker.name, 0))

    def pick_decode(self, query: PlacementQuery, workers: Workers) -> WorkerView:
        return min(workers, key=lambda worker: self._decoded.get(worker.name, 0))

    def began(self, query: PlacementQuery, placement: Placement) -> None:
        self._turns += 1
        self._prefilled[placement.prefill] = self._decoded[placement.decode] = self._turns

    @property
    def reason(self) -> str:
        return "round-robin"


class Splitwise(LeastLoaded):
    """May pair any two workers. Falls back to least-loaded where the pair has no link or a phase has no pool."""

    links_all: ClassVar[bool] = True

    def __init__(self, latency: LatencyPredictor, active: ActiveRequests) -> None:
        self._latency = latency
        self._active = active

    def choose(self, query: PlacementQuery) -> Placement | None:
        homes: dict[Role, list[WorkerView]] = {role: [] for role in Role}
        for worker in fitting(query):
            homes[self._pool(worker)].append(worker)
        prompts, tokens, mixed = homes[Role.PREFILL], homes[Role.DECODE], homes[Role.MIXED]
        if query.tokens_left == 1 or query.sibling_worker or not (prompts or tokens):
            return super().choose(query)
        prefill = self._shortest(query, prompts) or self._shortest(query, mixed)
        decode = self._roomiest(query, with_room(query, tokens)) or self._roomiest(query, with_room(query, mixed))
        if prefill is None and tokens:
            prefill = min(tokens, key=lambda worker: _pending(query, worker))
        if decode is None and prompts:
            decode = min(with_room(query, prompts), key=self._memory)
        if prefill is None or decode is None:
            least = min(with_room(query, fitting(query)), key=lambda worker: _pending(query, worker))
            return self.placed(query, least, least, "all machines are full: fewest pending tokens")
        if prefill is not decode and not query.view.linked(prefill.name, decode.name):
            return super().choose(query)
        usual = prefill.role is not Role.DECODE and decode.role is not Role.PREFILL
        return self.placed(query, prefill, decode, self.reason if usual else "overflow into the other pool")

    def _pool(self, worker: WorkerView) -> Role:
        """Its home pool, or mixed while it has work of the other phase from this gateway."""
        away = worker.role is Role.PREFILL and self._active.decoding(worker.name)
        away = away or (worker.role is Role.DECODE and self._active.prefilling(worker.name))
        return Role.MIXED if away else worker.role

    def _shortest(self, query: PlacementQuery, workers: list[WorkerView]) -> WorkerView | None:
        """The worker with the fewest pending tokens, if its queue is not long."""
        if not workers:
            return None
        best = min(workers, key=lambda worker: _pending(query, worker))
        pending, _ = _pending(query, best)
        is_long = pending > 0 and pending + query.request.num_tokens > QUEUE_TOKENS
        return None if is_long else best

    def _roomiest(self, query: PlacementQuery, workers: list[WorkerView]) -> WorkerView | None:
        """The worker with the least memory assigned, if the request and its answer fit there."""
        if not workers:
            return None
        best = min(workers, key=self._memory)
        used_tokens, _ = self._memory(best)
        wanted = query.request.num_tokens + longest_answer(query.request)
        return None if used_tokens + wanted >= self._latency.kv_tokens(best) else best

    def _memory(self, worker: WorkerView) -> tuple[int, str]:
        """Tokens of KV there, or once our requests there have their whole answers."""
        assigned = sum(work.num_tokens for work in self._active.decoding(worker.name))
        used = self._latency.kv_tokens(worker) - self._latency.free_tokens(worker)
        return max(assigned, used), worker.name

    @property
    def reason(self) -> str:
        return "shortest queue in pending tokens"


def _pending(query: PlacementQuery, worker: WorkerView) -> tuple[int, str]:
    return queued_tokens(query, worker), worker.name
