"""Which prompts, sent and not begun, should be computed elsewhere: roles change, and queues with them.

Those behind the longest queues are asked for again, the last of each first: who came last may still be in time. One
goes where its first token comes sooner by a quarter of what is promised for it. Pure.
"""

from collections.abc import Callable, Mapping

from cluster.policy.active_requests import ActiveRequests
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.routing.prefix_index import PrefixIndex
from cluster.policy.routing.router import Ask, Later, Placement, Refusal
from diptych.view import ClusterView, WorkerState, WorkerView

OFF = 1.2  # times: what was expected of a queue is taken for wrong
GAIN = 0.25  # of the TTFT SLO

Choose = Callable[[Ask], Placement | Refusal | Later | None]


class Requeue:
    """Owned by a Policy. `moves`: whether requests are placed again. `ttft_s`: the SLO of requests without one."""

    def __init__(
        self, forecast: LatencyPredictor, book: ActiveRequests, index: PrefixIndex, *, moves: bool, ttft_s: float | None
    ) -> None:
        self._latency = forecast
        self._active = book
        self._index = index
        self._moves = moves
        self._ttft_s = ttft_s

    def late(self, view: ClusterView, now_s: float) -> list[list[str]]:
        """Attempts that may gain elsewhere, they wait so long: the longest queue first, of each the last one first."""
        ready = [each for each in view.workers if each.state is WorkerState.READY]
        if not self._moves or len(ready) < 2:
            return []
        for worker in ready:
            self._look_again(worker)
        waits_s = [self._waits_s(worker.name, now_s) for worker in ready]
        waits_s.sort(key=lambda waits: -max(waits.values(), default=0.0))
        least_s = max(waits_s[-1].values(), default=0.0) + GAIN * (self._ttft_s or 0.0)
        found = [[key for key, wait_s in waits.items() if wait_s > least_s] for waits in waits_s]
        return [keys[::-1] for keys in found if keys]

    def better(self, ask: Ask, key: str, choose: Choose) -> Placement | None:
        """Where the attempt `key` should start again, by `ask`; None: it stays."""
        promised_s = ask.request.slo.ttft_s or self._ttft_s
        work = self._active.find(key)
        if promised_s is None or work is None or work.prefilled_s is not None:
            return None
        stays_s = self._waits_s(work.prefill, ask.now_s)[key]
        if stays_s <= GAIN * promised_s:
            return None
        with self._active.without(key), self._index.without(key):
            placement = choose(ask)
        if not isinstance(placement, Placement) or placement.prefill == work.prefill:
            return None
        wins = placement.predicted_ttft_s is not None and stays_s - placement.predicted_ttft_s > GAIN * promised_s
        return placement if wins else None

    def _waits_s(self, worker: str, now_s: float) -> Mapping[str, float]:
        """In how many seconds each of our prompts there will be done, oldest first."""
        works = self._active.prefilling(worker)
        waits_s, until_s = {}, self._active.ahead_s(worker, now_s) - sum(work.prefill_s for work in works)
        for work in works:
            until_s += work.prefill_s
            waits_s[work.key] = until_s
        return waits_s

    def _look_again(self, worker: WorkerView) -> None:
        """Beside its decodes of now, prompts there may take longer than was expected when they were sent, or less."""
        works = self._active.prefilling(worker.name)
        told_s = sum(work.prefill_s for work in works)
        if told_s <= 0.0:
            return
        mean = max(1, sum(work.new_tokens for work in works) // len(works))
        times = len(works) * self._latency.prefill_seconds(worker, mean, 0) / told_s
        if not 1.0 / OFF < times < OFF:
            self._active.slower(worker.name, times)
