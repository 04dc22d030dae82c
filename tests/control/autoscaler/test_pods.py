"""How many pods a pool shall have: within its bounds, more at once, fewer when that is safe, and settled in the end."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.control.autoscaler.pods import Change, Pods, ScaledPool, scaled_pools
from cluster.spec import Role
from cluster.spec_file import parse_spec
from diptych.view import ClusterView, PoolView, WorkerState, WorkerView

WINDOW_S = 30.0
DECODE = ScaledPool("decode", pods_per_worker=1, initial=1, min_workers=1, max_workers=4)
READY, STARTING, DRAINING, DEAD = WorkerState.READY, WorkerState.STARTING, WorkerState.DRAINING, WorkerState.DEAD


def seen(wanted: int, *states: WorkerState, pool: ScaledPool = DECODE) -> ClusterView:
    """A pool with workers in these states; without any, as many ready ones as there shall be."""
    workers = tuple(
        WorkerView(f"{pool.name}-{index}", pool.name, Role.DECODE, state)
        for index, state in enumerate(states or [READY] * wanted)
    )
    other = WorkerView("prefill-0", "prefill", Role.PREFILL, DRAINING)  # of no concern
    pools = (PoolView(pool.name, Role.DECODE, wanted, pool.min_workers, pool.max_workers),)
    return ClusterView(1, "c", None, (*workers, other), pools=pools)


@dataclass
class Asked:
    """A StatefulSet, and what became of it."""

    pods: int
    rule: Pods = field(default_factory=lambda: Pods((DECODE,), WINDOW_S))
    now_s: float = 1000.0

    def look(self, view: ClusterView | None, after_s: float = 5.0) -> int:
        self.now_s += after_s
        for change in self.rule.changes(view, {"decode": self.pods}, self.now_s):
            assert change.before == self.pods != change.after
            self.pods = change.after
        return self.pods


def test_pods_are_added_at_once_and_removed_after_the_window() -> None:
    asked = Asked(1)
    assert asked.look(seen(3, READY, STARTING, STARTING)) == 3
    assert asked.look(seen(3)) == 3
    assert asked.look(seen(2)) == 3
    assert asked.look(seen(2), after_s=WINDOW_S - 1) == 3
    assert asked.look(seen(2), after_s=1) == 2
    assert asked.look(seen(2), after_s=1000) == 2


def test_a_change_has_a_reason() -> None:
    rule = Pods((DECODE,), WINDOW_S)
    assert rule.changes(None, {"decode": 0}, 0.0) == [Change("decode", 0, 1, "the cluster starts with them")]
    assert rule.changes(seen(3), {"decode": 1}, 0.0) == [Change("decode", 1, 3, "target is 3 workers")]
    assert rule.changes(seen(2), {"decode": 3}, 0.0) == []
    (change,) = rule.changes(seen(2), {"decode": 3}, 31.0)
    assert change == Change("decode", 3, 2, "the pool has had no more than 2 workers for 31 s")


def test_no_pod_is_removed_while_a_worker_leaves() -> None:
    asked = Asked(2)
    for _ in range(20):
        assert asked.look(seen(1, READY, DRAINING)) == 2
    assert asked.look(seen(1)) == 2, "the while begins when it has left"
    assert asked.look(seen(1), after_s=WINDOW_S) == 1


def test_no_pod_is_removed_while_a_new_worker_drains_again() -> None:
    asked = Asked(2)
    for _ in range(20):
        assert asked.look(seen(1, READY, STARTING)) == 2


def test_no_pod_is_removed_while_the_number_of_workers_differs_from_the_target() -> None:
    for states in ((READY, READY, READY), (READY,)):
        asked = Asked(4)
        assert [asked.look(seen(2, *states)) for _ in range(20)] == [4] * 20


def test_no_pod_is_removed_while_a_worker_waits_for_a_node() -> None:
    asked = Asked(3)
    for state in (STARTING, DEAD):
        for _ in range(20):
            assert asked.look(seen(2, READY, state)) == 3


def test_a_replacement_worker_adds_no_pod() -> None:
    """What the controller does on `diptych leave`: one more is hired, one leaves, and as many are wanted."""
    asked = Asked(2)
    for states in ((READY, STARTING, DRAINING), (READY, STARTING), (READY, READY, DRAINING), (READY, READY)):
        for _ in range(20):
            assert asked.look(seen(2, *states)) == 2


def test_a_short_drop_of_the_target_removes_no_pod() -> None:
    asked = Asked(3)
    for _ in range(20):
        assert asked.look(seen(1), after_s=WINDOW_S - 1) == 3
        assert asked.look(seen(2), after_s=WINDOW_S - 1) == 3


def test_without_a_gateway_the_initial_pods_exist_and_none_is_removed() -> None:
    asked = Asked(0, Pods((replace(DECODE, initial=2),), WINDOW_S))
    assert asked.look(None) == 2
    assert asked.look(seen(4, *[READY] * 4)) == 4
    for _ in range(20):
        assert asked.look(None) == 4
    assert asked.look(seen(1)) == 4, "the while begins anew"
    assert asked.look(None, after_s=WINDOW_S) == 4
    assert asked.look(seen(1), after_s=WINDOW_S) == 4
    assert asked.look(seen(1), after_s=WINDOW_S) == 1


def test_a_pool_with_an_unknown_scale_is_not_changed() -> None:
    rule = Pods((DECODE, replace(DECODE, name="prefill")), 0.0)
    view = seen(3)  # of decode
    assert [change.pool for change in rule.changes(view, {"decode": 1, "prefill": 3}, 0.0)] == ["decode"]
    assert rule.changes(view, {}, 0.0) == [], "nor one whose pods are not known"


def test_bounds_hold_for_any_target() -> None:
    asked = Asked(2, Pods((DECODE,), 0.0))
    assert asked.look(seen(9)) == 4
    assert asked.look(seen(0, DEAD)) == 4, "there is one too many"
    assert asked.look(ClusterView(1, "c", None, (), pools=(PoolView("decode", Role.DECODE, 0, 0, 4),))) == 1


def test_scaled_pools_have_their_bounds_and_pods_per_worker() -> None:
    def pool(name: str, replicas: object, **more: object) -> dict[str, object]:
        return {"name": name, "role": "mixed", "replicas": replicas} | more

    gang = {"tensor": 2, "pipeline": 2}
    pools = [
        pool("one", {"min": 1, "max": 3}),
        pool("packed", {"min": 0, "max": 2}, parallel=gang),
        pool("spread", {"min": 1, "max": 2}, parallel=gang | {"placement": "strict_spread"}),
        pool("begins", 2, min_replicas=1, max_replicas=4),
        pool("fixed", 2),
        pool("narrow", {"min": 2, "max": 2}),
    ]
    assert scaled_pools(parse_spec({"model": "m", "pools": pools})) == (
        ScaledPool("one", 1, 1, 1, 3),
        ScaledPool("packed", 1, 0, 0, 2),
        ScaledPool("spread", 4, 1, 1, 2),
        ScaledPool("begins", 1, 2, 1, 4),
    )


# ---- whatever happens --------------------------------------------------------------------------------------------

BOUNDS = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4)).map(
    lambda drawn: ScaledPool("decode", drawn[2], drawn[0], drawn[0], drawn[0] + drawn[1])
)
STATES = st.lists(st.sampled_from(WorkerState), max_size=6)
VIEWS = st.none() | st.tuples(st.integers(0, 10), STATES)
STEPS = st.lists(st.tuples(VIEWS, st.floats(0, 60)), max_size=40)


def view_of(drawn: tuple[int, list[WorkerState]] | None, pool: ScaledPool) -> ClusterView | None:
    return None if drawn is None else seen(drawn[0], *drawn[1], pool=pool)


@given(BOUNDS, st.integers(0, 40), STEPS)
def test_every_change_lies_within_the_bounds_and_moves_toward_the_target(
    pool: ScaledPool, pods: int, steps: list[tuple[tuple[int, list[WorkerState]] | None, float]]
) -> None:
    asked = Asked(pods, Pods((pool,), WINDOW_S))
    for drawn, after_s in steps:
        before = asked.pods
        after = asked.look(view_of(drawn, pool), after_s)
        if after == before:
            continue
        assert pool.min_workers * pool.pods_per_worker <= after <= pool.max_workers * pool.pods_per_worker
        assert after % pool.pods_per_worker == 0, "whole workers"
        if after < before:
            assert drawn is not None
            assert drawn[1] in ([], [READY] * drawn[0]), "and nobody leaves"


@given(BOUNDS, st.integers(0, 40), STEPS, st.integers(0, 8))
def test_the_number_of_pods_converges_to_the_target(
    pool: ScaledPool, pods: int, steps: list[tuple[tuple[int, list[WorkerState]] | None, float]], wanted: int
) -> None:
    asked = Asked(pods, Pods((pool,), WINDOW_S))
    for drawn, after_s in steps:
        asked.look(view_of(drawn, pool), after_s)
    wanted = min(max(wanted, pool.min_workers), pool.max_workers)
    found = [asked.pods, *(asked.look(seen(wanted, pool=pool), 5.0) for _ in range(12))]
    assert found[-3:] == [wanted * pool.pods_per_worker] * 3
    assert sum(one != other for one, other in pairwise(found)) <= 1, "once, and not back"


@given(BOUNDS, st.lists(st.tuples(st.integers(0, 8), st.floats(0, WINDOW_S / 2)), min_size=2, max_size=40))
def test_an_oscillating_target_removes_no_pod(pool: ScaledPool, swings: list[tuple[int, float]]) -> None:
    """Nothing goes before one number has held for the whole window."""
    asked = Asked(pool.max_workers * pool.pods_per_worker, Pods((pool,), WINDOW_S))
    held_s, last, before = 0.0, None, asked.pods
    for wanted, after_s in swings:
        wanted = min(max(wanted, pool.min_workers), pool.max_workers)
        held_s = held_s + after_s if wanted == last else 0.0
        last = wanted
        after = asked.look(seen(wanted, pool=pool), after_s)
        assert after >= before or held_s >= WINDOW_S
        before = after
