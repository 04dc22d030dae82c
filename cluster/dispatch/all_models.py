"""What the dispatchers of several models answer together, for views, metrics and traces of the whole cluster.

Each model has a dispatcher of its own, with its own policy, queue and history. Knows no request.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import merge

from cluster.dispatch.dispatcher import Dispatcher
from cluster.policy.slo_attainment import GatewayAttainment
from diptych.history import Recent, RequestTrace, Window
from diptych.shapes import Shape, Timings
from diptych.slo import Calibration
from diptych.view import ClusterView, TaskFailures


class AllModels:
    """Owned by a gateway. `dispatchers`: by model, at least one; owned by the gateway too. `name`: of the gateway."""

    def __init__(self, name: str, dispatchers: Mapping[str, Dispatcher]) -> None:
        self._name = name
        self._by_model = dispatchers
        self._all = list(dispatchers.values())

    @property
    def view(self) -> ClusterView:
        return self._joined([each.view for each in self._all])

    async def audit(self) -> ClusterView:
        return self._joined(await asyncio.gather(*(each.audit() for each in self._all)))

    def _joined(self, views: list[ClusterView]) -> ClusterView:
        """A gateway's tasks fail per dispatcher; the other failures are those of the whole cluster in each view."""
        first = views[0]
        own = Counter[str]()
        for each in (each for view in views for each in view.failures if each.process == self._name):
            own[each.task] += each.count
        others = (each for each in first.failures if each.process != self._name)
        return replace(
            first,
            revision=min(view.revision for view in views),
            workers=tuple(worker for view in views for worker in view.workers),
            links=tuple(link for view in views for link in view.links),
            unlinked=frozenset().union(*(view.unlinked for view in views)),
            pools=tuple(pool for view in views for pool in view.pools),
            failures=(*others, *(TaskFailures(self._name, task, count) for task, count in own.items())),
            adapters=tuple(adapter for view in views for adapter in view.adapters),
            other_models=tuple(view.model for view in views[1:] if view.model is not None),
        )

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        owner = next((each for each in self._all if worker in each.discovery.clients), self._all[0])
        return await owner.measure(worker, shape, repeats)

    def slo_attainment(self) -> GatewayAttainment:
        """Only what the cluster's status shows; metrics are those of each model."""
        found = {model: each.slo_attainment() for model, each in self._by_model.items()}
        return GatewayAttainment(
            classes=tuple(replace(score, model=model) for model, each in found.items() for score in each.classes),
            outcomes=_summed(each.outcomes for each in found.values()),
            refused=_summed(each.refused for each in found.values()),
            calibration=_mean([each.calibration for each in found.values()]),
            queued=sum(each.queued for each in found.values()),
        )

    def recent(self) -> Recent:
        found = [each.recent() for each in self._all]
        events = merge(*(each.events for each in found), key=lambda aged: -aged[0])
        traffic = tuple(named for each in found for named in each.traffic)
        return Recent(max(each.uptime_s for each in found), traffic, tuple(events))

    def window(self, begin_ns: int, end_ns: int) -> Window:
        found = [each.window(begin_ns, end_ns) for each in self._all]
        return Window(
            tuple(trace for each in found for trace in each.traces),
            tuple(merge(*(each.events for each in found), key=lambda event: event.at_ns)),
            tuple(merge(*(each.loads for each in found), key=lambda load: load.at_ns)),
            max(each.whole_ns for each in found),
        )

    def oldest_requests(self, count: int) -> list[RequestTrace]:
        found = (trace for each in self._all for trace in each.oldest_requests(count))
        return sorted(found, key=lambda trace: trace.arrived_ns)[:count]

    def view_change(self) -> Awaitable[object]:
        """Done after the next change of any model's workers."""
        return _first([each.view_change() for each in self._all])


async def _first(waits: Iterable[Awaitable[object]]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _summed(counts: Iterable[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...]:
    found = Counter[str]()
    for each in counts:
        found.update(dict(each))
    return tuple(found.items())


def _mean(found: Sequence[Calibration]) -> Calibration:
    """Weighted by answers."""
    answers = sum(each.answers for each in found)

    def mean(name: str) -> float:
        return float(sum(each.answers * getattr(each, name) for each in found) / max(1, answers))

    return Calibration(
        answers, mean("within_p50"), mean("within_p90"), mean("error_tokens"), mean("asked_error_tokens")
    )
