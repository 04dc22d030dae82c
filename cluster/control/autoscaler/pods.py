"""The target number of pods of each pool. Pure: the cluster view, the current scales and the time are arguments.

It grows at once. It shrinks only when exactly the target number of workers has existed, all ready, for a while, because
a pod that goes takes its Ray node along, for which another worker may be waiting. Without a view nothing shrinks, and
the target is the cluster's initial number of workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.spec import ClusterSpec, PoolSpec
from diptych.view import ClusterView, PoolView, WorkerState

SPREAD = ("spread", "strict_spread")


@dataclass(frozen=True, slots=True)
class Scaled:
    """A pool that scales. `each`: pods of one worker; the other numbers are of workers."""

    name: str
    each: int
    first: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a pool's number of pods."""

    pool: str
    before: int
    after: int
    why: str


@dataclass(frozen=True, slots=True)
class _Fewer:
    """Since when this many pods have been enough."""

    pods: int
    since_s: float


def scaled(spec: ClusterSpec) -> tuple[Scaled, ...]:
    """The pools that scale. A pod holds all ranks of a worker, or one rank if they are spread."""
    found = (Scaled(each.name, _pods_of_one(each), each.replicas, *each.bounds) for each in spec.pools)
    return tuple(each for each in found if each.least < each.most)


def _pods_of_one(pool: PoolSpec) -> int:
    return pool.parallel.world_size if pool.parallel.placement in SPREAD else 1


class Pods:
    """Owned by the loop. `window_s`: how long fewer pods must have been enough before it shrinks."""

    def __init__(self, pools: tuple[Scaled, ...], window_s: float) -> None:
        self.pools = pools
        self._window_s = window_s
        self._fewer: dict[str, _Fewer] = {}

    def judge(self, view: ClusterView | None, asked_for: Mapping[str, int], now_s: float) -> list[Change]:
        """The changes to make. `asked_for`: current pods by pool, if known. `view` None: no gateway answers."""
        views = {} if view is None else {pool.name: pool for pool in view.pools}
        changes = []
        for pool in self.pools:
            fewer = self._fewer.pop(pool.name, None)
            if (before := asked_for.get(pool.name)) is None:
                continue
            pool_view = views.get(pool.name)
            workers = pool.first if pool_view is None else min(max(pool_view.wanted, pool.least), pool.most)
            after = workers * pool.each
            if after > before:
                why = "the cluster starts with them" if pool_view is None else f"target is {workers} workers"
                changes.append(Change(pool.name, before, after, why))
            elif after < before and view is not None and pool_view is not None and _is_settled(view, pool_view):
                since_s = fewer.since_s if fewer and fewer.pods == after else now_s
                if now_s - since_s >= self._window_s:
                    why = f"the pool has had no more than {workers} workers for {now_s - since_s:.0f} s"
                    changes.append(Change(pool.name, before, after, why))
                self._fewer[pool.name] = _Fewer(after, since_s)
        return changes


def _is_settled(view: ClusterView, pool: PoolView) -> bool:
    """Whether it has its target number of workers, all ready, and none leaving."""
    states = [worker.state for worker in view.workers if worker.pool == pool.name]
    return len(states) == pool.wanted and all(state is WorkerState.READY for state in states)
