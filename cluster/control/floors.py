"""What a change must leave: enough ready workers for each phase, and a pool within its bounds. Pure.

Knows keepers by their view only.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from cluster.control.changes import ChangeRefused
from cluster.control.replicas import ReplicaManager
from cluster.spec import MOST_REPLICAS, PoolSpec, Role
from diptych.view import WorkerState

FLOORED = {"prefill": (Role.PREFILL, Role.MIXED), "decode": (Role.DECODE, Role.MIXED)}


def is_ready(keeper: ReplicaManager) -> bool:
    return keeper.view.state is WorkerState.READY


def index_of(name: str) -> int:
    """A worker's number in its pool."""
    return int(name.rpartition("-")[2])


def refuse_beyond_bounds(pool: PoolSpec, now: int, replicas: int) -> None:
    """A pool that has `now` workers would have `replicas`. Raises `ChangeRefused`."""
    has_bounds = pool.max_replicas is not None
    least, most = pool.bounds if has_bounds else (0, MOST_REPLICAS)
    if not least <= replicas <= most:
        why = "its replicas" if has_bounds else "a pool"
        raise ChangeRefused(
            f"pool {pool.name} has {now} workers and would have {replicas}; {why} must lie between {least} and {most}"
        )


def refuse_below_floors(
    floors: Mapping[str, int], keepers: Iterable[ReplicaManager], becomes: Mapping[str, Role | None]
) -> None:
    """`becomes`: the new role of some workers, None for those that leave. Raises `ChangeRefused`."""
    now = [(each.name, each.role) for each in keepers if is_ready(each)]
    then = [becomes.get(name, role) for name, role in now]
    for phase, floor in floors.items():
        before = sum(role in FLOORED[phase] for _, role in now)
        after = sum(role in FLOORED[phase] for role in then)
        if after < floor and after < before:
            raise ChangeRefused(
                f"{after} ready workers would {phase}, and elastic.floors.{phase} is {floor}; add another first"
            )


def least_busy(
    staff: Collection[ReplicaManager], count: int, refuse: Callable[[Mapping[str, Role | None]], None]
) -> list[ReplicaManager]:
    """Those to let go of. Raises `ChangeRefused` when there are not so many whose going `refuse` allows."""
    chosen: list[ReplicaManager] = []
    refusal: ChangeRefused | None = None
    for keeper in sorted(staff, key=_work):
        if len(chosen) >= count:
            break
        try:
            refuse({each.name: None for each in (*chosen, keeper)})
        except ChangeRefused as error:
            refusal = error
            continue
        chosen.append(keeper)
    if refusal is not None and len(chosen) < count:
        raise refusal
    return chosen


def _work(keeper: ReplicaManager) -> tuple[bool, int, int, int]:
    """Less of it, and the worker is missed less: those that are not ready first, the latest of equals before others."""
    stats = keeper.view.stats
    sequences = stats.running + stats.waiting + stats.reserved + stats.leases
    return is_ready(keeper), sequences, stats.queued_tokens, -index_of(keeper.name)
