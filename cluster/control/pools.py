"""Rules of pools: names and order of workers, and the floors and bounds of changes. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from cluster.control.changes import ChangeRefused
from cluster.control.replicas import ReplicaManager, order_of
from cluster.runtime.interface import WorkerOrder
from cluster.spec import MAX_REPLICAS, ClusterSpec, PoolSpec, Role
from diptych.view import PoolView, WorkerState

PHASE_ROLES = {"prefill": (Role.PREFILL, Role.MIXED), "decode": (Role.DECODE, Role.MIXED)}


def is_ready(replica: ReplicaManager) -> bool:
    return replica.view.state is WorkerState.READY


def worker_name(pool: PoolSpec, index: int) -> str:
    return f"{pool.name}-{index}"


def first_orders(spec: ClusterSpec, secret: str) -> list[WorkerOrder]:
    """The workers that a cluster starts with."""
    return [
        order_of(spec, pool, worker_name(pool, index), secret) for pool in spec.pools for index in range(pool.replicas)
    ]


def index_of(name: str) -> int:
    """A worker's number in its pool."""
    return int(name.rpartition("-")[2])


def free_name(pool: PoolSpec, taken: Collection[str]) -> str:
    """The pool's first free name. Draining workers keep theirs."""
    return next(name for index in range(len(taken) + 1) if (name := worker_name(pool, index)) not in taken)


def in_order(replicas: Mapping[str, ReplicaManager], pools: Sequence[PoolSpec]) -> dict[str, ReplicaManager]:
    """Sorted by pool as in the specification, then by number."""
    places = {pool.name: place for place, pool in enumerate(pools)}
    ordered = sorted(replicas.values(), key=lambda each: (places[each.pool.name], index_of(each.name)))
    return {each.name: each for each in ordered}


def pool_views(spec: ClusterSpec, replicas: Iterable[ReplicaManager]) -> tuple[PoolView, ...]:
    """Each pool with its target, which is its number of workers that are not leaving."""
    targets = Counter(each.pool.name for each in replicas if not each.is_leaving)
    return tuple(
        PoolView(pool.name, pool.role, targets[pool.name], *pool.bounds, pool.model or spec.model)
        for pool in spec.pools
    )


def refuse_beyond_bounds(pool: PoolSpec, now: int, replicas: int) -> None:
    """Raise `ChangeRefused` if a pool with `now` workers must not have `replicas`."""
    has_bounds = pool.max_replicas is not None
    least, most = pool.bounds if has_bounds else (0, MAX_REPLICAS)
    if not least <= replicas <= most:
        why = "its replicas" if has_bounds else "a pool"
        raise ChangeRefused(
            f"pool {pool.name} has {now} workers and would have {replicas}; {why} must lie between {least} and {most}"
        )


def refuse_below_floors(
    floors: Mapping[str, int], replicas: Iterable[ReplicaManager], becomes: Mapping[str, Role | None]
) -> None:
    """Raise `ChangeRefused` if a change breaks a floor. `becomes`: new roles of workers; None: the worker leaves."""
    now = [(each.name, each.role) for each in replicas if is_ready(each)]
    then = [becomes.get(name, role) for name, role in now]
    for phase, floor in floors.items():
        before = sum(role in PHASE_ROLES[phase] for _, role in now)
        after = sum(role in PHASE_ROLES[phase] for role in then)
        if after < floor and after < before:
            raise ChangeRefused(
                f"{after} ready workers would {phase}, and elastic.floors.{phase} is {floor}; add another first"
            )


def least_busy(
    workers: Collection[ReplicaManager], count: int, refuse: Callable[[Mapping[str, Role | None]], None]
) -> list[ReplicaManager]:
    """The `count` workers to remove. Raises `ChangeRefused` if `refuse` allows fewer."""
    chosen: list[ReplicaManager] = []
    refusal: ChangeRefused | None = None
    for replica in sorted(workers, key=_work):
        if len(chosen) >= count:
            break
        try:
            refuse({each.name: None for each in (*chosen, replica)})
        except ChangeRefused as error:
            refusal = error
            continue
        chosen.append(replica)
    if refusal is not None and len(chosen) < count:
        raise refusal
    return chosen


def _work(replica: ReplicaManager) -> tuple[bool, int, int, int]:
    """Sort key of removal: workers that are not ready first, then by work, then the highest number."""
    stats = replica.view.stats
    sequences = stats.running + stats.waiting + stats.reserved + stats.leases
    return is_ready(replica), sequences, stats.queued_tokens, -index_of(replica.name)
