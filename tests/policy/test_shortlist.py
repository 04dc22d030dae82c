"""A shortlist loses little: the same placements with few workers; with many mostly the same, or as good."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster.policy.active_requests import ActiveRequest, ActiveRequests
from cluster.policy.admission.early_rejection import Admission
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.estimate.lengths import LearnedLengths, expected_tokens
from cluster.policy.policy import Policy
from cluster.policy.routing.lending import Lending
from cluster.policy.routing.prefix_index import Match, PrefixIndex, prefix_hashes
from cluster.policy.routing.router import Placement, PlacementQuery, SentWork
from cluster.policy.routing.slo.exhaustive import AllWorkers
from cluster.policy.routing.slo.router import MAX_EXHAUSTIVE, SLORouter
from cluster.policy.routing.slo.shortlist import shortlist
from cluster.policy.routing.slo.worker_table import WorkerTable
from cluster.policy.scaling.migrations import MigrationPlanner
from cluster.policy.scaling.requeue import Requeue
from cluster.spec import Role
from diptych.view import ClusterView, WorkerState, WorkerView
from tests.policy.test_policy import steps
from tests.policy.views import BLOCK, BLOCKS, SIMPLE, request, spec, worker
from workers.costs import CostModel, LinearCost
from workers.kv_events import HashChanges, KVEvents
from workers.profiles.computed import roofline
from workers.profiles.hardware import hardware_of
from workers.profiles.shapes import shape_of
from workers.request import SLO, Request

TARGET = SLO(ttft_s=2.0, tpot_s=0.05)
REAL = LinearCost(0.012, 0.0002, 1e-8, 0.0001, 1e-7, 0.001, 1e-9, 0.0)
A100 = roofline(shape_of("llama-2-13b"), hardware_of("a100-80gb"), 1, 1)
EVERYBODY = 1 << 20


def opened(few: int, cost: CostModel | None = SIMPLE, **engine: Any) -> Policy:
    """With our router, which looks at everybody where there are at most `few`."""
    made = spec("slo", slo=TARGET, cost=cost, **engine)
    active, index, lengths = ActiveRequests(), PrefixIndex(), LearnedLengths()
    latency = LatencyPredictor(made, active)
    router = SLORouter(latency, index, active, TARGET, partial(expected_tokens, lengths), few)
    mover = MigrationPlanner(latency, active, rebalances=False, tpot_s=None)
    requeue = Requeue(latency, active, index, is_on=False, ttft_s=None)
    return Policy(router, Admission(), latency, active, index, lengths, mover, requeue, Lending(made))


@given(cases=steps)
@settings(max_examples=60)
def test_few_workers_are_all_evaluated(
    cases: list[tuple[ClusterView, Request, set[str], bool, str, float, int]],
) -> None:
    with_it, without = opened(MAX_EXHAUSTIVE), opened(EVERYBODY)
    for number, (picture, wanted, avoid, alone, beside, wait_s, fate) in enumerate(cases):
        asked = replace(wanted, id=f"r{number}")
        query = PlacementQuery(picture, asked, {"d0": SentWork(50, 2)}, avoid, alone, beside, now_s=number * wait_s)
        placed = with_it.choose(query)
        assert placed == without.choose(query)
        follow((with_it, without), query, placed, fate)


@given(cases=steps)
@settings(max_examples=100)
def test_a_shortlist_finds_every_worker_that_can_serve(
    cases: list[tuple[ClusterView, Request, set[str], bool, str, float, int]],
) -> None:
    """However few there are: it answers where a look at everybody does, with workers that are ready, linked and fit."""
    short, whole = opened(0), opened(EVERYBODY)
    for number, (picture, wanted, avoid, alone, beside, wait_s, fate) in enumerate(cases):
        asked = replace(wanted, id=f"r{number}")
        query = PlacementQuery(picture, asked, {"d0": SentWork(50, 2)}, avoid, alone, beside, now_s=number * wait_s)
        placed, exact = short.choose(query), whole.choose(query)
        assert (placed is None) == (exact is None)
        if isinstance(placed, Placement):
            fit = {
                each.name
                for each in picture.workers
                if each.state is WorkerState.READY
                and each.capacity_tokens > asked.num_tokens
                and each.name not in avoid
            }
            assert {placed.prefill, placed.decode} <= fit
            assert placed.colocated or picture.linked(placed.prefill, placed.decode)
            assert isinstance(exact, Placement) and (beside not in fit or placed.prefill == exact.prefill)
        follow((short, whole), query, placed, fate)


def follow(policies: tuple[Policy, ...], query: PlacementQuery, placed: object, fate: int) -> None:
    """The request is served as far as its fate has it: sent, prefilled, ended."""
    if not isinstance(placed, Placement):
        return
    for policy in policies:
        policy.began(query, placed)
        if fate > 0:
            policy.prefilled(query.request.key, query.now_s + 0.5, 0.4)
        if fate > 1:
            policy.ended(query.request.key, query.now_s + 1.5, 7)
        policy.active.check()


@given(
    depths=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    reader=st.integers(0, 8),
    own=st.integers(0, 300),
    unlinked=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))),
    narrow=st.booleans(),
    behind=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), min_size=9, max_size=9),
    used=st.sampled_from([0, BLOCKS - 20]),
    leases=st.lists(st.integers(0, 2), min_size=9, max_size=9),
)
def test_a_shortlist_and_an_exhaustive_search_find_the_same_prefix_owner(
    depths: list[int],
    reader: int,
    own: int,
    unlinked: set[tuple[int, int]],
    narrow: bool,
    behind: list[tuple[int, int, int]],
    used: int,
    leases: list[int],
) -> None:
    """Whatever its role; which lends most, of equals none for prefill, then the one with the fewest readers; linked to
    the reader and of its dtype.
    """
    made = spec("slo", slo=TARGET, cost=SIMPLE)
    dtypes = {pool.name: "bfloat16" if narrow and pool.role is Role.DECODE else "float32" for pool in made.pools}
    pools = tuple(replace(pool, engine=replace(pool.engine, dtype=dtypes[pool.name])) for pool in made.pools)
    active, index = ActiveRequests(), PrefixIndex()
    latency = LatencyPredictor(replace(made, pools=pools), active)
    workers = tuple(worker(f"{'pdm'[row % 3]}{row}", used=used, leases=leases[row]) for row in range(9))
    names, wanted = [each.name for each in workers], request(length=500)
    pairs = frozenset((names[owner], names[to]) for owner, to in unlinked)
    cached: dict[str, int] = {}  # that it can lend: half of its free blocks for what is in host memory, none on a disk
    for name, depth, (host, disk, remote) in zip(names, depths, behind, strict=True):
        parts = (depth, depth + host, depth + host + disk, depth + host + disk + remote)
        left = prefix_hashes(wanted.prompt)
        device, on_host, on_disk, on_server = (left[first:last] for first, last in pairwise((0, *parts)))
        tiers = {"device": device, "host": on_host, "disk": on_disk, "remote": on_server}
        changes = {tier: HashChanges(tuple(there)) for tier, there in tiers.items()}
        index.take(name, "1", KVEvents(0, 1, 1, 128, whole=True, **changes), "st"[len(device) % 2])
        cached[name] = min(499, 128 * len(device) + min(128 * len(on_host), (BLOCKS - used) * BLOCK // 2))
    query = PlacementQuery(ClusterView(1, "c", None, workers, unlinked=pairs), wanted, now_s=1000.0)
    table = WorkerTable(latency, active, index, TARGET.tpot_s)
    short = shortlist(table, query, lambda: index.depths(prefix_hashes(wanted.prompt), 1000.0), 9, 0)
    assert short is not None
    known = index.matches(prefix_hashes(wanted.prompt), 1000.0)
    assert all(short.match(each) == known.get(each.name, Match(0)) for each in workers)
    whole = AllWorkers(query, lambda each: known.get(each.name, Match(0)), latency)
    found = whole.prefix_owner(own, names[reader])
    assert short.prefix_owner(own, names[reader]) == found
    lenders = [
        each
        for each in workers
        if each.name != names[reader]
        and cached[each.name] > own
        and (each.name, names[reader]) not in pairs
        and dtypes[each.pool] == dtypes[workers[reader].pool]
    ]
    deepest = [each for each in lenders if cached[each.name] == max(cached[other.name] for other in lenders)]
    if found is None:
        assert not lenders
    else:
        assert found[1] in {each.name for each in deepest} and found[0] == cached[found[1]]
        assert found[1][0] != "p" or all(each.role is Role.PREFILL for each in deepest)
        alike = [each for each in deepest if (each.role is Role.PREFILL) is (found[1][0] == "p")]
        assert leases[names.index(found[1])] == min(each.stats.leases for each in alike)


class Town:
    """Sixty workers under a load of our own and of other gateways, that two policies are asked about."""

    def __init__(self, seed: int, cost: CostModel, roles: str) -> None:
        self.draw = random.Random(seed)
        self.short, self.whole = (
            opened(few, cost, max_batch_tokens=2048, max_running=256) for few in (MAX_EXHAUSTIVE, EVERYBODY)
        )
        workers = [self.changed(worker(f"{roles[number % len(roles)]}{number}")) for number in range(60)]
        self.picture = ClusterView(1, "c", None, tuple(workers))
        self.now_s = 1000.0
        self.under_way: list[Request] = []

    def changed(self, known: WorkerView) -> WorkerView:
        """With other statistics: what other gateways do there."""
        running = 0 if known.role is Role.PREFILL else self.draw.choice((0, 1, 3, 8))
        stats = structs.replace(
            known.stats,
            running=running,
            queued_tokens=running + self.draw.choice((0, 0, 0, 500, 3000)),
            total_blocks=BLOCKS,
            free_blocks=BLOCKS - running * self.draw.randrange(5, 60),
        )
        return structs.replace(known, stats=stats)

    def next(self, number: int) -> tuple[Placement, Placement]:
        """A request, by the shortlist and by a look at everybody; it goes on by the latter."""
        draw = self.draw
        self.now_s += draw.expovariate(40.0)
        workers = list(self.picture.workers)
        for row in draw.sample(range(60), 5):
            workers[row] = self.changed(workers[row])
        self.picture = replace(self.picture, workers=tuple(workers))
        first, length = 10_000 * draw.randrange(12), draw.choice((100, 700, 1500, 4000))
        wanted = request(f"r{number}", length, max_tokens=draw.choice((1, 50, 400)), first=first)
        query = PlacementQuery(self.picture, wanted, now_s=self.now_s)
        short, whole = self.short.choose(query), self.whole.choose(query)
        assert isinstance(short, Placement) and isinstance(whole, Placement)
        follow((self.short, self.whole), query, whole, 0)
        self.under_way.append(wanted)
        self.move_on()
        return short, whole

    def move_on(self) -> None:
        for wanted in list(self.under_way):
            fate = self.draw.random()
            for policy in (self.short, self.whole):
                if fate < 0.02:
                    policy.prefilled(wanted.key, self.now_s)
                elif fate < 0.03:
                    policy.prefilled(wanted.key, self.now_s)
                    policy.ended(wanted.key, self.now_s, 20)
            if 0.02 <= fate < 0.03:
                self.under_way.remove(wanted)


@pytest.mark.parametrize("roles", ["pd", "m", "ppdm"])
@pytest.mark.parametrize("cost", [REAL, A100], ids=["linear", "roofline"])
def test_of_many_workers_the_shortlist_has_those_that_an_exhaustive_search_prefers(cost: CostModel, roles: str) -> None:
    town, same = Town(7, cost, roles), 0
    later: list[float] = []
    longer: list[float] = []
    for number in range(200):
        short, whole = town.next(number)
        assert short.predicted_ttft_s is not None and whole.predicted_ttft_s is not None
        same += (short.prefill, short.decode) == (whole.prefill, whole.decode)
        later.append(short.predicted_ttft_s / max(1e-3, whole.predicted_ttft_s))
        longer.append((short.predicted_tpot_s or 0.0) / max(1e-4, whole.predicted_tpot_s or 0.0))
    assert same >= 160, "four of five are the very same"
    for ratios in (later, longer):
        assert sorted(ratios)[190] <= 1.05, "nineteen of twenty are as good to 5 %"
        assert sum(ratios) <= 1.02 * len(ratios)


@given(
    seed=st.integers(0, 1 << 32),
    cost=st.sampled_from([REAL, A100, SIMPLE]),
    roles=st.sampled_from(["pd", "m", "ppdm"]),
    changes=st.lists(st.integers(0, 60), min_size=25, max_size=25),
)
@settings(max_examples=25)
def test_a_shortlist_that_follows_changes_decides_as_one_that_is_made_anew(
    seed: int, cost: CostModel, roles: str, changes: list[int]
) -> None:
    """Whether few or all workers have changed: their statistics, what was sent to them, their requests."""
    town = Town(seed, cost, roles)
    followed, anew = (opened(0, cost, max_batch_tokens=2048, max_running=256) for _ in range(2))
    under_way: list[Request] = []
    for number, count in enumerate(changes):
        town.now_s += town.draw.expovariate(1.0)
        workers = list(town.picture.workers)
        for row in town.draw.sample(range(60), count):
            workers[row] = town.changed(workers[row])
        town.picture = replace(town.picture, workers=tuple(workers))
        wanted = request(f"r{number}", town.draw.choice((100, 1500)), max_tokens=town.draw.choice((1, 50, 400)))
        sent = {town.draw.choice(workers).name: SentWork(50, 2) for _ in range(count % 4)}
        query = PlacementQuery(town.picture, wanted, sent, now_s=town.now_s)
        latency, active, index = anew._latency, anew.active, anew.index
        anew._router._table = WorkerTable(latency, active, index, TARGET.tpot_s)  # type: ignore[attr-defined]
        placed = followed.choose(query)
        assert isinstance(placed, Placement) and placed == anew.choose(query)
        follow((followed, anew), query, placed, 0)
        under_way.append(wanted)
        if town.draw.random() < 0.5:
            ended = under_way.pop(0).key
            for policy in (followed, anew):
                policy.prefilled(ended, town.now_s, 0.1)
                policy.ended(ended, town.now_s, 20)


@given(
    cases=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 5000), st.integers(0, BLOCKS)), min_size=30, max_size=30
    ),
    running=st.lists(st.integers(0, 29), max_size=12),
    cost=st.sampled_from([REAL, A100, SIMPLE]),
)
@settings(max_examples=40)
def test_rows_are_the_same_whether_few_or_many_are_written(
    cases: list[tuple[int, int, int]], running: list[int], cost: CostModel
) -> None:
    """A worker at a time, or all at once: the same numbers, to the bit."""
    made = spec("slo", slo=TARGET, cost=cost, max_batch_tokens=64, max_running=64)
    active = ActiveRequests()
    short = [WorkerTable(LatencyPredictor(made, active), active, PrefixIndex(), TARGET.tpot_s) for _ in range(2)]
    for number, row in enumerate(running):
        decode = f"{'pdm'[row % 3]}{row}"
        active.began(
            ActiveRequest(f"r{number}", "p0", decode, 300, 200, 50, 0.1 * number, 1000.0, 1000.1, tpot_slo_s=0.05)
        )
    workers = tuple(
        worker(f"{'pdm'[row % 3]}{row}", running=busy, queued_tokens=busy + queued, used=used)
        for row, (busy, queued, used) in enumerate(cases)
    )
    empty = tuple(structs.replace(each, stats=structs.replace(each.stats, running=99)) for each in workers)
    at_once, one_by_one = short
    at_once.update(PlacementQuery(ClusterView(1, "c", None, workers), request(), now_s=1000.0))
    one_by_one.update(PlacementQuery(ClusterView(1, "c", None, empty), request(), now_s=1000.0))
    for row in range(30):
        seen = (*workers[: row + 1], *empty[row + 1 :])
        one_by_one.update(PlacementQuery(ClusterView(1, "c", None, seen), request(), now_s=1000.0))
    assert one_by_one.columns.tobytes() == at_once.columns.tobytes()


def test_a_worker_that_changes_its_pool_is_derived_again() -> None:
    """Even if its statistics and records are the same."""
    made = spec("slo", slo=TARGET, cost=SIMPLE)
    costs = (REAL, SIMPLE, A100)
    made = replace(made, pools=tuple(replace(each, cost=cost) for each, cost in zip(made.pools, costs, strict=True)))
    workers = tuple(worker(f"d{row}", running=3, queued_tokens=500, used=40) for row in range(20))
    moved = tuple(structs.replace(each, pool="mixed") if row % 9 == 1 else each for row, each in enumerate(workers))
    asks = [PlacementQuery(ClusterView(1, "c", None, each), request(), now_s=1000.0) for each in (workers, moved)]
    active = ActiveRequests()
    followed, fresh = (
        WorkerTable(LatencyPredictor(made, active), active, PrefixIndex(), TARGET.tpot_s) for _ in range(2)
    )
    for query in asks:
        followed.update(query)
    before = followed.columns[:, 0].tolist()
    fresh.update(asks[1])
    assert followed.columns.tobytes() == fresh.columns.tobytes()
    assert followed.columns[:, 1].tolist() != before
