"""Roles for workers that are there: what is looked at, what is chosen, and how few change."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.replanning import PlanFailed, Question, Wanted
from cluster.offline.plan import refit, roles
from cluster.offline.plan.inline import _apart
from cluster.offline.plan.refit import refitted
from cluster.offline.plan.roles import LOOKED_AT, Kind, Search, dealt, kinds_of, load_of, planned
from cluster.spec import ClusterSpec, ElasticSpec, GatewaySpec, PoolSpec, Role
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.request import SLO

# A prompt token costs 0.5 ms, a step 10 ms and 1 ms for each sequence.
COST = LinearCost(0.01, 0.0005, 0.0, 0.001, 0.0, 0.0, 0.0)
ENGINE = EngineConfig(kv_blocks=2000, max_batch_tokens=512, max_running=64, batching="adaptive")
P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def question(
    prefill: int = 1, decode: int = 3, *, prompt: int = 800, output: int = 3, rate: float = 5.0, cached: int = 0
) -> Question:
    source, at_s, requests = random.Random(0), 0.0, []
    for _ in range(30):
        requests.append(Wanted(at_s, prompt, prompt - cached, output))
        at_s += source.expovariate(rate)
    pools = tuple(
        PoolSpec(role.value, role, count, engine=ENGINE, cost=COST) for role, count in ((P, prefill), (D, decode))
    )
    spec = ClusterSpec("m", pools, gateway=GatewaySpec(routing="promise"), elastic=ElasticSpec(mode="act"))
    counts = {("prefill", P): prefill, ("decode", D): decode}
    return Question(spec, counts, {}, tuple(requests), rate, SLO(1.0, 0.05))


def never() -> bool:
    return False


# ---- what is chosen ----------------------------------------------------------------------------------------------


def test_prompts_get_more_workers_and_the_figures_say_why() -> None:
    asked = question()
    found = planned(asked)
    prompting = sum(count for (_, role), count in found.counts.items() if role is not D)
    assert prompting > 1 and found.attained > found.attained_now + 0.1
    assert sum(found.counts.values()) == 4 and found.simulated > 0
    assert planned(asked) == found, "the same question has the same answer"


def test_roles_that_do_are_left_as_they_are() -> None:
    asked = question(2, 2, prompt=100, output=5, rate=1.0)
    found = planned(asked)
    assert found.counts == asked.counts and found.attained == found.attained_now == 1.0


def test_in_a_hurry_the_best_of_two_is_the_answer() -> None:
    asked = question()
    found = planned(asked, hurry=lambda: True)
    assert found.simulated == 2 * len(asked.requests) and found.attained >= found.attained_now


def test_workers_that_nobody_knows_the_cost_of_are_not_planned_for() -> None:
    asked = question()
    pools = tuple(replace(pool, cost=None) for pool in asked.spec.pools)
    with pytest.raises(PlanFailed, match="pool prefill has neither cost"):
        planned(replace(asked, spec=replace(asked.spec, pools=pools)))
    pools = tuple(replace(pool, hardware="no-such-gpu") for pool in pools)
    with pytest.raises(PlanFailed, match="no-such-gpu"):
        planned(replace(asked, spec=replace(asked.spec, model="opt-13b", pools=pools)))


def test_a_lone_prefill_worker_serves_only_as_a_mixed_one() -> None:
    asked = question(1, 1)
    pools = (replace(asked.spec.pools[0], role=M),)
    found = planned(replace(asked, spec=replace(asked.spec, pools=pools), counts={("prefill", P): 1}))
    assert found.counts == {("prefill", M): 1} and found.attained_now == 0.0
    with pytest.raises(PlanFailed, match="serve nobody in any roles"):
        planned(replace(asked, counts={}))


# ---- what is looked at -------------------------------------------------------------------------------------------


def test_every_sort_of_roles_is_looked_at_the_present_ones_first() -> None:
    asked = question(3, 5)
    search = Search(asked, never)
    now = tuple(kind.now for kind in kinds_of(asked))
    ways = search._looked_at(now)
    assert ways[0] == now and len(ways) in (LOOKED_AT, LOOKED_AT + 1)
    sorts = {(bool(counts[P]), bool(counts[M])) for (counts,) in ways}
    assert sorts == {(True, False), (False, True), (True, True)}
    assert all(sum(counts.values()) == 8 for (counts,) in ways)


def test_floors_hold_in_every_way() -> None:
    asked = question(3, 3)
    spec = replace(asked.spec, elastic=ElasticSpec(mode="act", floors={"prefill": 2, "decode": 3}))
    ways = list(Search(replace(asked, spec=spec), never)._ways())
    assert ways and all(counts[P] + counts[M] >= 2 and counts[D] + counts[M] >= 3 for (counts,) in ways)


def test_very_many_workers_have_a_bounded_number_of_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "MOST_RANKED", 50)
    asked = question(20, 20)
    ways = [counts for (counts,) in Search(asked, never)._ways()]
    assert 5 < len(ways) <= 50 and {40} == {sum(counts.values()) for counts in ways}
    assert any(counts[M] == 40 for counts in ways)


def test_very_many_kinds_of_workers_have_a_bounded_number_of_ways() -> None:
    asked = question()
    like = asked.spec.pools[0]
    pools = tuple(replace(like, name=f"p{index}", cost=COST.scaled(1.0 + index)) for index in range(9))
    spec = replace(asked.spec, pools=(*pools, asked.spec.pools[1]))
    asked = replace(asked, spec=spec, counts={(pool.name, P): 2 for pool in pools} | {("decode", D): 2})
    search = Search(asked, never)
    assert 500 < len(list(search._ways())) <= roles.MOST_RANKED


def test_pools_that_are_alike_are_one_kind_and_others_are_not() -> None:
    asked = question(2, 3)
    (kind,) = kinds_of(asked)
    assert [pool.name for pool in kind.pools] == ["prefill", "decode"] and kind.now == {P: 2, D: 3, M: 0}
    prefill, decode = asked.spec.pools
    other = replace(asked, spec=replace(asked.spec, pools=(prefill, replace(decode, cost=COST.scaled(2.0)))))
    assert [kind.count for kind in kinds_of(other)] == [2, 3]
    empty = replace(asked, counts={("decode", D): 3})
    assert [kind.count for kind in kinds_of(empty)] == [3]


@given(st.data())
def test_roles_are_dealt_so_that_as_few_change_as_can_be(data: st.DataObject) -> None:
    asked = question()
    now = {(pool.name, role): data.draw(st.integers(0, 4)) for pool in asked.spec.pools for role in Role}
    total = sum(now.values())
    prefill = data.draw(st.integers(0, total))
    mixed = data.draw(st.integers(0, total - prefill))
    wanted = {P: prefill, D: total - prefill - mixed, M: mixed}
    there = {role: sum(n for (_, each), n in now.items() if each is role) for role in Role}
    found = dealt([Kind(asked.spec.pools, there)], (wanted,), now)
    assert all(found.values())
    for pool in asked.spec.pools:
        had, has = (sum(n for (name, _), n in counts.items() if name == pool.name) for counts in (now, found))
        assert had == has, "no worker leaves its pool"
    assert {role: sum(n for (_, each), n in found.items() if each is role) for role in Role} == wanted
    changed = sum((Counter(found) - Counter(now)).values())
    assert changed == sum(max(0, wanted[role] - there[role]) for role in Role)


# ---- the load ----------------------------------------------------------------------------------------------------


def test_cached_tokens_are_prefixes_that_come_again() -> None:
    load = load_of(question(prompt=800, cached=640))
    seen: set[int] = set()
    fresh = []
    for each in load.arrivals:
        assert len(each.prefix) == 640 // 16
        fresh.append(not seen.issuperset(each.prefix))
        seen |= set(each.prefix)
    assert sum(fresh) == roles.CHAINS, "after the first of each conversation all are cached"
    assert not any(each.prefix for each in load_of(question()).arrivals)


def test_requests_at_one_time_are_no_load() -> None:
    asked = question()
    once = tuple(replace(each, at_s=0.0) for each in asked.requests)
    with pytest.raises(PlanFailed, match="30 requests at one time"):
        load_of(replace(asked, requests=once))


# ---- another fleet -----------------------------------------------------------------------------------------------


def on_gpus(gpus: int, rate: float, ttft_s: float = 1.0) -> Question:
    asked = question(prompt=300, output=20, rate=rate)
    pool = PoolSpec("all", M, gpus, engine=ENGINE, hardware="a100-80gb")
    spec = ClusterSpec("opt-13b", (pool,), elastic=ElasticSpec(mode="act"))
    return replace(asked, spec=spec, counts={("all", M): gpus}, slo=SLO(ttft_s, 0.1))


def test_fewer_gpus_that_would_do_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "REQUESTS", 10)
    monkeypatch.setattr(refit, "MOST_REQUESTS", 100)
    words = refitted(on_gpus(2, rate=1.0))
    assert words.startswith("fewer GPUs would do: 1 instead of 2 a100-80gb serve 1 requests/s for 90%")


def test_a_promise_that_no_fleet_keeps_is_told_with_what_comes_closest() -> None:
    assert "1 a100-80gb and twice as many: no placement" in refitted(on_gpus(1, rate=1.0, ttft_s=0.001))


def test_nothing_is_said_of_hardware_that_nobody_named() -> None:
    assert refitted(question()) == ""


def test_what_fails_apart_fails_here() -> None:
    def broken() -> None:
        raise ZeroDivisionError("as it was")

    with pytest.raises(ZeroDivisionError, match="as it was"):
        _apart(broken)
