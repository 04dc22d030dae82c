"""TetriInfer: least-loaded prefill, decode by predicted lengths and the power of two, idle workers change sides.

Hu et al., arXiv 2401.11181 (later ShuffleInfer). The decode worker is drawn from those whose free memory covers the
predicted answer (alpha), of two the one with the fewer heavy decodes for each light one. There the prefill worker
decides when the prompt is done; here the router does when the request comes.

A role is routing state: every worker can do both phases, so a flip is a note in this router and no call to anyone.
"""

import math
from typing import ClassVar

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.draws import Draws
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.estimate.lengths import Lengths
from cluster.policy.routing.baselines.load_based import LeastLoaded, two_of
from cluster.policy.routing.picking import Workers, num_sequences
from cluster.policy.routing.router import Ask, Placement
from cluster.spec import Role
from diptych.view import WorkerState, WorkerView

HEAVY_DECODE_TOKENS = 128
IDLE_S = 60.0
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Tetri(LeastLoaded):
    """`lengths` predicts. A worker that has been idle for `idle_s` flips when all of the other side are busy.

    One at a time, `idle_s` apart; a side is never emptied.
    """

    links_all: ClassVar[bool] = True

    def __init__(
        self,
        latency: LatencyPredictor,
        active: ActiveRequests,
        lengths: Lengths,
        draws: Draws,
        *,
        idle_s: float = IDLE_S,
    ) -> None:
        self._latency = latency
        self._active = active
        self._lengths = lengths
        self._draws = draws
        self._idle_s = idle_s
        self._flipped: set[str] = set()
        self._flipped_s = -math.inf
        self._busy_s: dict[str, float] = {}  # worker -> when it was last seen with work

    def role(self, worker: WorkerView) -> Role:
        return _OTHER[worker.role] if worker.name in self._flipped else worker.role

    def began(self, ask: Ask, placement: Placement) -> None:
        """Each request that comes is also a look at who is idle."""
        sides: dict[Role, list[WorkerView]] = {Role.PREFILL: [], Role.DECODE: [], Role.MIXED: []}
        busy = set()
        for worker in ask.view.workers:
            if worker.state is WorkerState.READY:
                sides[self.role(worker)].append(worker)
                if _has_work(worker) or worker.name in (placement.prefill, placement.decode):
                    busy.add(worker.name)
                    self._busy_s[worker.name] = ask.now_s
        for role, other in _OTHER.items():
            idle = [worker.name for worker in sides[role] if self._idles(worker.name, ask.now_s)]
            wanted = sides[other] and all(worker.name in busy for worker in sides[other])
            if idle and wanted and len(sides[role]) > 1 and ask.now_s - self._flipped_s >= self._idle_s:
                self._flipped ^= {min(idle)}
                self._flipped_s = self._busy_s[min(idle)] = ask.now_s

    def _idles(self, worker: str, now_s: float) -> bool:
        since_s = max(self._busy_s.setdefault(worker, now_s), self._active.touched_s(worker))
        return now_s - since_s >= self._idle_s

    def pick_decode(self, ask: Ask, workers: Workers) -> WorkerView:
        wanted = ask.request.num_tokens + self._lengths(ask.request)
        alpha = [worker for worker in workers if self._free_tokens(worker) >= wanted]
        drawn = two_of(self._draws, alpha or workers)
        return min(drawn, key=lambda worker: (self._heaviness(worker), num_sequences(ask, worker)))

    def _free_tokens(self, worker: WorkerView) -> int:
        """Memory that our requests there will not need for what they still have to write."""
        growth = sum(work.output_tokens for work in self._active.decoding(worker.name))
        return self._latency.free_tokens(worker) - growth

    def _heaviness(self, worker: WorkerView) -> float:
        """Heavy decodes for each light one, of ours."""
        works = self._active.decoding(worker.name)
        heavy = sum(work.output_tokens > HEAVY_DECODE_TOKENS for work in works)
        light = len(works) - heavy
        return heavy / light if light else (math.inf if heavy else 0.0)

    @property
    def reason(self) -> str:
        return "room for the predicted answer, fewer heavy decodes of two"


def _has_work(worker: WorkerView) -> bool:
    stats = worker.stats
    return bool(stats.queued_tokens or stats.waiting or stats.running or stats.reserved or stats.leases)
