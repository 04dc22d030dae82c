"""Pools on different GPUs: each by its own costs, for the router and for roles."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.fleet import models_of
from cluster.policy.active_requests import ActiveRequests
from cluster.policy.admission.early_rejection import Admission
from cluster.policy.estimate.latency import LatencyPredictor
from cluster.policy.estimate.lengths import LearnedLengths, expected_tokens
from cluster.policy.policy import Policy
from cluster.policy.routing.lending import Lending
from cluster.policy.routing.prefix_index import PrefixIndex
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.policy.routing.slo.router import MAX_EXHAUSTIVE, SLORouter
from cluster.policy.scaling.balance import Group, Mix, utilization
from cluster.policy.scaling.elastic import Elastic, _targets
from cluster.policy.scaling.migrations import MigrationPlanner
from cluster.policy.scaling.requeue import Requeue
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.view import ClusterView, WorkerState, WorkerView
from tests.policy.gpu_types import (
    BOTH,
    CHEAP_FIRST,
    ELASTIC,
    FAST_FIRST,
    FIXED,
    Kind,
    both_slos,
    cluster_of,
    run_long_prompts,
    share_prefilled_by_h100s,
)
from tests.policy.test_elastic import Answering, report
from tests.policy.views import BLOCK, BLOCKS, view
from workers.config import EngineConfig
from workers.costs import CostModel, LinearCost
from workers.request import SLO, Request, SamplingParams
from workers.stats import WorkerStats

FAST = LinearCost(0.0, 0.0005, 0.0, 0.045, 0.0, 0.0, 0.0, 0.0)  # half a millisecond for a prompt token
SLOW = replace(FAST, prefill_token_s=0.001)
TARGET = SLO(ttft_s=4.0, tpot_s=0.05)
ENGINE = EngineConfig(block_size=BLOCK, kv_blocks=BLOCKS, max_batch_tokens=100_000)


# ---- the router --------------------------------------------------------------------------------------------------


def opened(few: int, **pools: tuple[Role, CostModel]) -> Policy:
    """With our router, which looks at everybody where there are at most `few`."""
    made = ClusterSpec(
        "m",
        tuple(PoolSpec(name, role, engine=ENGINE, cost=cost) for name, (role, cost) in pools.items()),
        gateway=GatewaySpec(routing="slo", slo=TARGET),
    )
    active, index, lengths = ActiveRequests(), PrefixIndex(), LearnedLengths()
    latency = LatencyPredictor(made, active)
    router = SLORouter(latency, index, active, TARGET, partial(expected_tokens, lengths), few)
    mover = MigrationPlanner(latency, active, rebalances=False, tpot_s=None)
    requeue = Requeue(latency, active, index, is_on=False, ttft_s=None)
    return Policy(router, Admission(), latency, active, index, lengths, mover, requeue, Lending(made))


def worker(pool: str, role: Role, running: int = 0) -> WorkerView:
    stats = WorkerStats(total_blocks=BLOCKS, free_blocks=BLOCKS, running=running)
    return WorkerView(f"{pool}-0", pool, role, WorkerState.READY, "1", capacity_tokens=BLOCK * BLOCKS, stats=stats)


def request(name: str, length: int, first: int, max_tokens: int = 9) -> Request:
    return Request(name, tuple(range(first, first + length)), SamplingParams(seed=1, max_tokens=max_tokens))


def test_prompts_go_where_they_are_done_soonest_not_where_fewest_wait() -> None:
    idle = replace(FAST, prefill_token_s=1.0)  # for decodes only
    policy = opened(MAX_EXHAUSTIVE, fast=(Role.PREFILL, FAST), slow=(Role.PREFILL, SLOW), d=(Role.DECODE, idle))
    picture = view(worker("fast", Role.PREFILL), worker("slow", Role.PREFILL), worker("d", Role.DECODE))
    sent = []
    for number in range(6):
        query = PlacementQuery(picture, request(f"r{number}", 600, 1000 * number, max_tokens=1), now_s=100.0)
        placement = policy.choose(query)
        assert isinstance(placement, Placement)
        policy.began(query, placement)
        sent.append(placement.prefill)
    assert sent.count("fast-0") == 4 and sent.count("slow-0") == 2  # as quick to the last one as can be


@pytest.mark.parametrize("few", [0, MAX_EXHAUSTIVE])
@pytest.mark.parametrize(("length", "decode"), [(1000, "d-0"), (200, "fast-0")], ids=["busy", "idle"])
def test_a_fast_prefill_worker_decodes_only_if_the_slow_one_can_take_its_prompts(
    few: int, length: int, decode: str
) -> None:
    """Prompts that take half of the quick one's time would take all of the slow one's."""
    policy = opened(few, fast=(Role.PREFILL, FAST), slow=(Role.PREFILL, SLOW), d=(Role.DECODE, FAST))
    picture = view(worker("fast", Role.PREFILL), worker("slow", Role.PREFILL), worker("d", Role.DECODE, running=2))
    now_s = 100.0
    for number in range(10):
        wanted = request(f"r{number}", length, 2000 * number, max_tokens=1)
        query = PlacementQuery(picture, wanted, now_s=now_s)
        placement = policy.choose(query)
        assert isinstance(placement, Placement) and placement.prefill_s is not None
        policy.began(query, placement)
        policy.prefilled(wanted.key, now_s + placement.prefill_s)
        policy.ended(wanted.key, now_s + placement.prefill_s)
        now_s += 1.0
    placement = policy.choose(PlacementQuery(picture, request("last", 100, 90_000), now_s=now_s))
    assert isinstance(placement, Placement) and placement.decode == decode


# ---- roles -------------------------------------------------------------------------------------------------------

Counts = tuple[int, int, int]  # workers that prefill, decode, do both
PROMPTS = Mix(rate=8, prompt_tokens=2750, computed_tokens=2750, output_tokens=70, ttft_s=4.0, tpot_s=0.075)
ANSWERS = Mix(rate=9, prompt_tokens=350, computed_tokens=350, output_tokens=400, ttft_s=4.0, tpot_s=0.075)
ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


class Unlike:
    """Two H100 and two A100 workers by their published profiles, whose roles follow decisions."""

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        made = cluster_of(kinds, ELASTIC)
        models = models_of(made)
        self.pools = tuple(replace(pool, cost=models[pool.name].cost) for pool in made.pools)
        self.subject = Elastic(replace(made, pools=self.pools))
        self.now_s = 0.0
        self.answering = Answering()
        self.workers = [
            WorkerView(f"{pool.name}-{number}", pool.name, pool.role, WorkerState.READY, "1", stats=stats)
            for pool in self.pools
            for stats in [WorkerStats(total_blocks=pool.engine.kv_blocks, free_blocks=pool.engine.kv_blocks)]
            for number in range(pool.replicas)
        ]

    def run(self, mix: Mix, seconds: int = 30) -> list[str]:
        """Which workers flipped."""
        flipped = []
        for _ in range(seconds):
            self.now_s += 1.0
            load = report(mix)
            self.subject.on_report(load, self.now_s)
            self.workers = self.answering.later(self.workers, load, self.now_s)
            decision = self.subject.decide(ClusterView(1, "c", None, tuple(self.workers)), self.now_s)
            if decision is not None:
                assert decision.role is not None
                flipped.append(decision.worker)
                self.workers = [
                    structs.replace(each, role=decision.role) if each.name == decision.worker else each
                    for each in self.workers
                ]
        return flipped

    def counts(self) -> list[Counts]:
        """Of each pool."""
        roles = [[each.role for each in self.workers if each.pool == pool.name] for pool in self.pools]
        return [(each.count(ROLES[0]), each.count(ROLES[1]), each.count(ROLES[2])) for each in roles]

    def need(self, counts: Iterable[Counts], mix: Mix) -> float:
        groups = [
            Group(pool.name, role, count, pool.cost, pool.engine.kv_blocks * pool.engine.block_size, 256)
            for pool, each in zip(self.pools, counts, strict=True)
            for role, count in zip(ROLES, each, strict=True)
            if pool.cost is not None
        ]
        return utilization(groups, mix).worst

    def least(self, mix: Mix) -> float:
        """Of all roles that there can be."""
        splits = [
            [(p, d, pool.replicas - p - d) for p in range(pool.replicas + 1) for d in range(pool.replicas - p + 1)]
            for pool in self.pools
        ]
        return min(self.need(each, mix) for each in product(*splits))


@pytest.mark.parametrize("kinds", [FAST_FIRST, BOTH], ids=["right", "both"])
def test_for_long_prompts_fast_workers_prefill_and_cheap_ones_decode(kinds: tuple[Kind, ...]) -> None:
    """From all mixed, that is better only once both kinds have changed. No step with a prompt meets this SLO."""
    subject, tight = Unlike(kinds), replace(PROMPTS, tpot_s=0.055)
    subject.run(tight)
    fast, cheap = subject.counts()
    assert fast == (2, 0, 0) and cheap[0] == 1
    assert subject.need(subject.counts(), tight) <= 1.02 * subject.least(tight)
    assert not subject.run(tight, 10), "there they stay"


@pytest.mark.parametrize("kinds", [FAST_FIRST, CHEAP_FIRST, BOTH], ids=["right", "reverse", "both"])
@pytest.mark.parametrize("mix", [PROMPTS, ANSWERS], ids=["prompts", "answers"])
def test_from_any_start_roles_come_to_meet_both_slos(kinds: tuple[Kind, ...], mix: Mix) -> None:
    subject = Unlike(kinds)
    subject.run(mix)
    assert subject.need(subject.counts(), mix) <= 1.0


def test_slow_mixed_workers_have_decodes_too() -> None:
    """Though all would fit on the quick ones, whose steps stay shorter: prompts that a worker computes, it decodes."""
    subject, busier = Unlike(BOTH), replace(PROMPTS, rate=9)
    assert subject.need([(1, 0, 1), (2, 0, 0)], busier) < 0.8 * subject.need([(1, 0, 1), (0, 0, 2)], busier)
    subject.run(busier)
    assert subject.counts() == [(0, 0, 2), (2, 0, 0)], "a third change would gain less than it costs"


def test_many_kinds_are_tried_kind_by_kind() -> None:
    """All of their roles at once would be too many."""
    kinds = [[Group(f"k{n}", role, 2, SLOW.scaled(1.0 + n), 10_000, 64) for role in ROLES] for n in range(6)]
    found = list(_targets(kinds))
    assert len(found) == 6 * 8
    assert all(sum(a is not b for a, b in zip(each, kinds, strict=True)) == 1 for each in found)
    assert len(list(_targets(kinds[:2]))) == 9 * 9


@settings(max_examples=60, deadline=None)
@example(share=0.984375, prefills=1, decodes=3, rate=17.0, role=Role.DECODE)
@given(st.floats(0.2, 1.0), st.integers(1, 4), st.integers(1, 4), st.floats(0.2, 20.0), st.sampled_from(ROLES))
def test_a_faster_worker_raises_no_share(share: float, prefills: int, decodes: int, rate: float, role: Role) -> None:
    """In the place of an equal one of each role."""
    cost = LinearCost(0.02, 0.0002, 0.0, 0.0005, 0.0, 0.0, 0.0, 0.0)
    mix = Mix(rate, 800, 800, 200, 2.0, 0.05)
    there = [
        Group("a", Role.PREFILL, prefills, cost, 200_000, 256),
        Group("a", Role.DECODE, decodes, cost, 200_000, 256),
    ]
    like, quick = (Group("b", role, 1, each, 200_000, 256) for each in (cost, cost.scaled(share)))
    before, after = utilization([*there, like], mix), utilization([*there, quick], mix)
    assert after.ttft <= before.ttft * 1.001 + 1e-6
    rounding = 0.5 / (200_000 / 900)  # step times are those of whole sequences, of as many as fit on a worker
    assert after.decode_queue <= before.decode_queue * 1.001 + rounding
    assert role is Role.MIXED or after.tpot <= before.tpot * 1.001 + 1e-3  # chunks fill a mixed one's steps


# ---- a whole cluster, in virtual time ------------------------------------------------------------------------------


def test_workers_of_other_blocks_and_ranks_share_requests() -> None:
    kinds = (Kind("h100-80gb", 1, Role.PREFILL), Kind("a100-80gb", 1, Role.DECODE, tensor=8, block_size=32))
    found = run_long_prompts(kinds, FIXED, rate=2.0, duration_s=5.0)
    assert all(each.outcome is RequestOutcome.FINISHED for each in found.served)
    fast, cheap = sorted(found.workers, key=lambda each: each.name, reverse=True)
    assert fast.prompt_tokens > cheap.prompt_tokens and cheap.output_tokens > fast.output_tokens


def test_reversed_roles_are_corrected() -> None:
    fixed, elastic = (run_long_prompts(CHEAP_FIRST, each, rate=8.0, duration_s=8.0) for each in (FIXED, ELASTIC))
    assert share_prefilled_by_h100s(elastic) > share_prefilled_by_h100s(fixed)
    assert both_slos(elastic) >= both_slos(fixed)
