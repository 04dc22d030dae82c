"""The target number of pods of each pool. Pure: the cluster view, the current scales and the time are arguments.

A pool grows at once. It shrinks only after it has had exactly its target number of workers, all ready, for a while: the
removed pod is a Ray node, which another worker may wait for. Without a view nothing shrinks, and the target is the
cluster's initial number of workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.spec import ClusterSpec, PoolSpec
from diptych.view import ClusterView, PoolView, WorkerState

SPREAD = ("spread", "strict_spread")


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """A pool that scales. `initial` and the bounds are numbers of workers."""

    name: str
    pods_per_worker: int
    initial: int
    min_workers: int
    max_workers: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a pool's number of pods."""

    pool: str
    before: int
    after: int
    why: str


@dataclass(frozen=True, slots=True)
class _FewerPods:
    """The time since which this many pods have been enough."""

    pods: int
    since_s: float


def scaled_pools(spec: ClusterSpec) -> tuple[ScaledPool, ...]:
    """The pools that scale. A pod holds all ranks of a worker, or one rank if they are spread."""
    pools = (ScaledPool(each.name, _pods_per_worker(each), each.replicas, *each.bounds) for each in spec.pools)
    return tuple(each for each in pools if each.min_workers < each.max_workers)


def _pods_per_worker(pool: PoolSpec) -> int:
    return pool.parallel.world_size if pool.parallel.placement in SPREAD else 1


class Pods:
    """Owned by the loop. `window_s`: how long fewer pods must have been enough before a pool shrinks."""

    def __init__(self, pools: tuple[ScaledPool, ...], window_s: float) -> None:
        self.pools = pools
        self._window_s = window_s
        self._fewer: dict[str, _FewerPods] = {}

    def changes(self, view: ClusterView | None, current: Mapping[str, int], now_s: float) -> list[Change]:
        """The changes to make. `current`: pods by pool, where known. `view` None: no gateway answers."""
        views = {} if view is None else {pool.name: pool for pool in view.pools}
        changes = []
        for pool in self.pools:
            fewer = self._fewer.pop(pool.name, None)
            if (before := current.get(pool.name)) is None:
                continue
            pool_view = views.get(pool.name)
            workers = pool.initial
            if pool_view is not None:
                workers = min(max(pool_view.wanted, pool.min_workers), pool.max_workers)
            after = workers * pool.pods_per_worker
            if after > before:
                why = "the cluster starts with them" if pool_view is None else f"target is {workers} workers"
                changes.append(Change(pool.name, before, after, why))
            elif after < before and view is not None and pool_view is not None and _is_settled(view, pool_view):
                since_s = fewer.since_s if fewer and fewer.pods == after else now_s
                if now_s - since_s >= self._window_s:
                    why = f"the pool has had no more than {workers} workers for {now_s - since_s:.0f} s"
                    changes.append(Change(pool.name, before, after, why))
                self._fewer[pool.name] = _FewerPods(after, since_s)
        return changes


def _is_settled(view: ClusterView, pool: PoolView) -> bool:
    """Whether it has its target number of workers, all ready, and none leaving."""
    states = [worker.state for worker in view.workers if worker.pool == pool.name]
    return len(states) == pool.wanted and all(state is WorkerState.READY for state in states)
