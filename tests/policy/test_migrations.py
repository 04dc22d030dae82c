"""Which decodes migrate: from draining workers and prefill workers, to workers with room, and never back and forth."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.policy.routing.router import Placement
from cluster.policy.scaling.migrations import (
    MAX_CONCURRENT,
    MAX_CONCURRENT_ROLE,
    REST_S,
    RETRY_S,
    MigrationPlanner,
    Move,
)
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView
from tests.policy.views import BLOCKS, Story, request, view, worker
from workers.request import SLO

TIGHT = SLO(tpot_s=0.045)  # four sequences and a half, at ten milliseconds for each


def draining(each: WorkerView) -> WorkerView:
    return replace(each, state=WorkerState.DRAINING)


class Scenario:
    """Decodes of one gateway on workers d0, d1, ...; each with its answer's expected length."""

    def __init__(self, *, rebalances: bool = True) -> None:
        self.story = Story("random")
        policy = self.story.policy
        self.planner = MigrationPlanner(policy._latency, policy.active, rebalances=rebalances, tpot_s=None)
        self.contexts: dict[str, int] = {}
        self.now_s = 1000.0

    def decode(self, name: str, at: str, *, length: int = 100, answer: int = 200, slo: SLO = TIGHT) -> str:
        self.story.now_s = self.now_s
        policy = self.story.policy
        wanted = request(name, length, max_tokens=answer, slo=slo)
        prefill = worker("p0")
        policy.began(self.story.ask(view(prefill, worker(at)), wanted), Placement(prefill.name, at, "by hand"))
        self.story.prefilled(wanted)
        self.contexts[wanted.key] = length + 1
        return wanted.key

    def look(self, picture: ClusterView, after_s: float = 1.0) -> tuple[Move, ...]:
        self.now_s += after_s
        return self.planner.plan(picture, lambda: self.contexts, self.now_s)

    def end(self, move: Move, *, moved: bool = True) -> None:
        if moved:
            self.story.policy.active.moved(move.key, move.target)
        self.planner.ended(move, self.now_s, moved=moved)


def test_every_decode_leaves_a_draining_worker_a_few_at_a_time() -> None:
    scenario = Scenario(rebalances=False)
    keys = {scenario.decode(f"r{n}", "d0", answer=50 + n) for n in range(6)}
    picture = view(draining(worker("d0", running=6, used=60)), worker("d1"), worker("p0"))
    moves = scenario.look(picture)
    assert len(moves) == MAX_CONCURRENT and {move.target for move in moves} == {"d1"}
    assert moves[0].key == "r5/0", "the longest answer first"
    assert scenario.look(picture) == ()
    for move in moves:
        scenario.end(move)
    rest = scenario.look(picture)
    assert {move.key for move in (*moves, *rest)} == keys


def test_a_prefill_worker_takes_no_decode_of_a_draining_worker() -> None:
    scenario = Scenario(rebalances=False)
    scenario.decode("a", "d0")
    others = draining(worker("d0", running=1, used=10)), worker("p0")
    assert scenario.look(view(*others)) == (), "preflight links no prefill worker to it"
    late = worker("m0", running=9, used=90)
    (move,) = scenario.look(view(*others, late))
    assert move.target == "m0", "even if it is late there"
    scenario.end(move, moved=False)
    assert scenario.look(view(*others, late), RETRY_S / 2) == (), "a failed migration is retried later"
    assert [each.target for each in scenario.look(view(*others, late), RETRY_S)] == ["m0"]


def test_no_worker_takes_a_decode_without_room_for_it() -> None:
    scenario = Scenario(rebalances=False)
    scenario.decode("a", "d0", length=3000)
    full = worker("d1", running=1, used=BLOCKS - 100)
    assert scenario.look(view(draining(worker("d0", running=1, used=200)), full)) == ()
    small = replace(worker("d2"), capacity_tokens=3000)
    assert scenario.look(view(draining(worker("d0", running=1, used=200)), small)) == ()


def unlinked(picture: ClusterView, owner: str, reader: str) -> ClusterView:
    """The view in which no KV can move between these two."""
    return dataclasses.replace(picture, unlinked=picture.unlinked | {(owner, reader)})


def test_nothing_migrates_without_a_proven_link() -> None:
    scenario = Scenario(rebalances=False)
    scenario.decode("a", "d0")
    picture = view(draining(worker("d0", running=1, used=10)), worker("d1"), worker("d2", running=3, used=30))
    assert [move.target for move in scenario.look(unlinked(picture, "d0", "d1"))] == ["d2"]
    scenario.end(Move("a/0", "d0", "d2", "", "drain"), moved=False)
    alone = unlinked(unlinked(picture, "d0", "d1"), "d0", "d2")
    assert scenario.look(alone, 2 * RETRY_S) == ()
    turning = Scenario()
    turning.decode("b", "p1", slo=SLO(tpot_s=0.2))
    picture = turned(worker("d0", running=1, used=10))
    assert turning.look(unlinked(picture, "p1", "d0")) == ()
    assert turning.look(picture)


def turned(*others: WorkerView, queued: int = 4000, used: int = 30) -> ClusterView:
    """p1 was a decode worker and still has three decodes; p2 has prompts to compute."""
    return view(worker("p1", running=3, used=used), worker("p2", queued_tokens=queued), *others)


def test_decodes_leave_a_prefill_worker_while_prompts_wait() -> None:
    scenario = Scenario()
    keys = {scenario.decode(f"r{n}", "p1", slo=SLO(tpot_s=0.2)) for n in range(3)}
    target = worker("d0", running=1, used=10)
    assert scenario.look(turned(target, queued=0)) == (), "no prompts wait"
    moves = scenario.look(turned(target))
    assert {move.key for move in moves} == keys and {move.target for move in moves} == {"d0"}
    assert {move.kind for move in moves} == {"role"}
    assert Scenario(rebalances=False).look(turned(target)) == ()


def test_of_two_prefill_workers_the_one_with_fewer_decodes_is_cleared_first() -> None:
    scenario = Scenario()
    for n in range(MAX_CONCURRENT_ROLE + 4):
        scenario.decode(f"a{n}", "p1", slo=SLO(tpot_s=0.1))
    few = {scenario.decode(f"b{n}", "p2", slo=SLO(tpot_s=0.1)) for n in range(2)}
    many = worker("p1", running=MAX_CONCURRENT_ROLE + 4, used=8 * (MAX_CONCURRENT_ROLE + 4), queued_tokens=4000)
    picture = view(many, worker("p2", running=2, used=16), worker("d0", running=4, used=32))
    moves = scenario.look(picture)
    assert {move.key for move in moves[:2]} == few
    assert len(moves) == 5, "nine fit into nine tenths of a tenth of a second"


@pytest.mark.parametrize(
    "target",
    [
        worker("d0", running=9, used=90),  # its SLO would be missed
        worker("d0", running=1, used=BLOCKS - 20),  # no room
        worker("d0", running=1, used=10, waiting=2),  # prompts wait there, and come before a reservation
        worker("m0", queued_tokens=300),  # no decodes there: its prompts would be slowed instead
        worker("p3"),
    ],
)
def test_decodes_stay_on_a_prefill_worker_if_their_migration_would_harm_others(target: WorkerView) -> None:
    scenario = Scenario()
    for n in range(3):
        scenario.decode(f"r{n}", "p1", slo=SLO(tpot_s=0.1))
    assert scenario.look(turned(target)) == ()


def test_answers_that_are_nearly_done_do_not_migrate() -> None:
    scenario = Scenario()
    for n in range(3):
        scenario.decode(f"r{n}", "p1", length=900, answer=10, slo=SLO(tpot_s=0.2))
    picture = turned(worker("d0", running=1, used=10), used=180)
    heavy = replace(picture.workers[0], kv_token_bytes=10**7)  # nine seconds on its link
    assert scenario.look(dataclasses.replace(picture, workers=(heavy, *picture.workers[1:]))) == ()
    assert scenario.look(picture)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.sampled_from("dmp"), st.booleans()), min_size=2, max_size=5),
    steps=st.lists(st.tuples(st.floats(0.1, 3.0), st.booleans()), min_size=1, max_size=30),
)
def test_planned_migrations_are_valid_for_any_view(
    sizes: list[tuple[int, str, bool]], steps: list[tuple[float, bool]]
) -> None:
    """Whether they succeed or not: none migrates twice at once or to a draining worker, and none returns at once."""
    scenario = Scenario()
    names = [f"{kind}{index}" for index, (_, kind, _) in enumerate(sizes)]
    leaving = {name for name, (_, _, leaves) in zip(names, sizes, strict=True) if leaves}
    where: dict[str, str] = {}
    for name, (count, _, _) in zip(names, sizes, strict=True):
        where |= {scenario.decode(f"{name}-{n}", name, answer=20 + 30 * n): name for n in range(count)}
    visited: dict[str, set[str]] = {key: {name} for key, name in where.items()}
    for after_s, moved in steps:
        counts = {name: sum(at == name for at in where.values()) for name in names}
        workers = [worker(name, running=counts[name], used=8 * counts[name]) for name in names]
        picture = view(*(draining(each) if each.name in leaving else each for each in workers))
        moves = scenario.look(picture, after_s)
        assert len({move.key for move in moves}) == len(moves)
        for move in moves:
            assert where[move.key] == move.source != move.target and move.target not in leaving
            target = next(each for each in picture.workers if each.name == move.target)
            assert target.role is not Role.PREFILL
        for move in moves:
            scenario.end(move, moved=moved)
            if moved:
                assert move.target not in visited[move.key] or scenario.now_s - 1000.0 > REST_S
                visited[move.key].add(move.target)
                where[move.key] = move.target
    scenario.story.policy.active.check()
