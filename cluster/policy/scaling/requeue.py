"""Decides which prompts that have not started should move to other workers, since roles and queues change.

The longest queues come first, and of each queue the last prompt. A prompt moves if its first token then comes sooner by
a quarter of its TTFT SLO. Pure.
"""

from collections.abc import Callable, Mapping

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.prefix_index import PrefixIndex
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from diptych.view import ClusterView, WorkerState, WorkerView

TOLERANCE = 1.2  # factor by which a queue's prediction may be off before it is corrected
GAIN = 0.25  # of the TTFT SLO, by which the first token must come sooner

Choose = Callable[[PlacementQuery], Placement | Refusal | Enqueue | None]


class Requeue:
    """Owned by a Policy. `is_on`: whether prompts are requeued. `ttft_s`: the SLO of requests without one."""

    def __init__(
        self,
        latency: LatencyPredictor,
        active: ActiveRequests,
        index: PrefixIndex,
        *,
        is_on: bool,
        ttft_s: float | None,
    ) -> None:
        self._latency = latency
        self._active = active
        self._index = index
        self.is_on = is_on
        self._ttft_s = ttft_s

    def candidates(self, view: ClusterView, now_s: float) -> list[list[str]]:
        """Attempts that may gain elsewhere, by queue: the longest queue first, and its last attempt first."""
        if not self.is_on or not self._active:
            return []
        ready = [each for each in view.workers if each.state is WorkerState.READY]
        if len(ready) < 2:
            return []
        for worker in ready:
            self._update_prediction(worker)
        waits_s = [self._waits_s(worker.name, now_s) for worker in ready]
        waits_s.sort(key=lambda waits: -max(waits.values(), default=0.0))
        min_s = max(waits_s[-1].values(), default=0.0) + GAIN * (self._ttft_s or 0.0)
        found = [[key for key, wait_s in waits.items() if wait_s > min_s] for waits in waits_s]
        return [keys[::-1] for keys in found if keys]

    def better_placement(self, query: PlacementQuery, key: str, choose: Choose) -> Placement | None:
        """A better placement for the attempt `key`; None: it stays."""
        ttft_slo_s = query.request.slo.ttft_s or self._ttft_s
        work = self._active.find(key)
        if ttft_slo_s is None or work is None or work.prefilled_s is not None:
            return None
        here_s = self._waits_s(work.prefill, query.now_s)[key]
        if here_s <= GAIN * ttft_slo_s:
            return None
        with self._active.without(key), self._index.without(key):
            placement = choose(query)
        if not isinstance(placement, Placement) or placement.prefill == work.prefill:
            return None
        there_s = placement.predicted_ttft_s
        return placement if there_s is not None and here_s - there_s > GAIN * ttft_slo_s else None

    def _waits_s(self, worker: str, now_s: float) -> Mapping[str, float]:
        """Seconds until each of our prompts there is done, oldest first."""
        works = self._active.prefilling(worker)
        waits_s, until_s = {}, self._active.worker_load(worker).ahead_s(now_s) - sum(work.prefill_s for work in works)
        for work in works:
            until_s += work.prefill_s
            waits_s[work.key] = until_s
        return waits_s

    def _update_prediction(self, worker: WorkerView) -> None:
        """Scale the predicted times of our prompts there if they no longer fit the worker's present decodes."""
        works = self._active.prefilling(worker.name)
        predicted_s = sum(work.prefill_s for work in works)
        if predicted_s <= 0.0:
            return
        mean = max(1, sum(work.new_tokens for work in works) // len(works))
        factor = len(works) * self._latency.prefill_seconds(worker, mean, 0) / predicted_s
        if not 1.0 / TOLERANCE < factor < TOLERANCE:
            self._active.scale_prompts(worker.name, factor)
