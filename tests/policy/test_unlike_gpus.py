"""Pools of unlike GPUs: each by its own costs, for the router and for roles."""

from dataclasses import replace
from functools import partial

import pytest
from views import BLOCK, BLOCKS, view

from cluster.policy.admission import Admission
from cluster.policy.book import Book
from cluster.policy.forecast import Forecast
from cluster.policy.lengths import Learned, expected_tokens
from cluster.policy.moves import Mover
from cluster.policy.placement import Ask, Placement
from cluster.policy.policy import Policy
from cluster.policy.prefix_index import PrefixIndex
from cluster.policy.promise import FEW, Promise
from cluster.policy.requeue import Requeue
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from cluster.view import WorkerState, WorkerView
from workers.config import EngineConfig
from workers.costs import CostModel, LinearCost
from workers.request import SLO, Request, SamplingParams
from workers.stats import WorkerStats

FAST = LinearCost(0.0, 0.0005, 0.0, 0.045, 0.0, 0.0, 0.0, 0.0)  # half a millisecond for a prompt token
SLOW = replace(FAST, prefill_token_s=0.001)
PROMISED = SLO(ttft_s=4.0, tpot_s=0.05)
ENGINE = EngineConfig(block_size=BLOCK, kv_blocks=BLOCKS, max_batch_tokens=100_000)


# ---- the router --------------------------------------------------------------------------------------------------


def opened(few: int, **pools: tuple[Role, CostModel]) -> Policy:
    """With our router, which looks at everybody where there are at most `few`."""
    made = ClusterSpec(
        "m",
        tuple(PoolSpec(name, role, engine=ENGINE, cost=cost) for name, (role, cost) in pools.items()),
        gateway=GatewaySpec(routing="promise", slo=PROMISED),
    )
    book, index, lengths = Book(), PrefixIndex(), Learned()
    forecast = Forecast(made, book)
    router = Promise(forecast, index, book, PROMISED, partial(expected_tokens, lengths), few)
    mover = Mover(forecast, book, rebalances=False, tpot_s=None)
    requeue = Requeue(forecast, book, index, moves=False, ttft_s=None)
    return Policy(router, Admission(), forecast, book, index, lengths, mover, requeue)


def worker(pool: str, role: Role, running: int = 0) -> WorkerView:
    stats = WorkerStats(total_blocks=BLOCKS, free_blocks=BLOCKS, running=running)
    return WorkerView(f"{pool}-0", pool, role, WorkerState.READY, "1", capacity_tokens=BLOCK * BLOCKS, stats=stats)


def request(name: str, length: int, first: int, max_tokens: int = 9) -> Request:
    return Request(name, tuple(range(first, first + length)), SamplingParams(seed=1, max_tokens=max_tokens))


def test_prompts_go_where_they_are_done_soonest_and_not_where_fewest_wait() -> None:
    idle = replace(FAST, prefill_token_s=1.0)  # for decodes only
    policy = opened(FEW, fast=(Role.PREFILL, FAST), slow=(Role.PREFILL, SLOW), d=(Role.DECODE, idle))
    picture = view(worker("fast", Role.PREFILL), worker("slow", Role.PREFILL), worker("d", Role.DECODE))
    sent = []
    for number in range(6):
        ask = Ask(picture, request(f"r{number}", 600, 1000 * number, max_tokens=1), now_s=100.0)
        placement = policy.choose(ask)
        assert isinstance(placement, Placement)
        policy.began(ask, placement)
        sent.append(placement.prefill)
    assert sent.count("fast-0") == 4 and sent.count("slow-0") == 2  # as quick to the last one as can be


@pytest.mark.parametrize("few", [0, FEW])
@pytest.mark.parametrize(("length", "decode"), [(1000, "d-0"), (200, "fast-0")], ids=["busy", "idle"])
def test_a_quick_prefill_worker_decodes_only_if_the_slow_one_can_do_without_it(
    few: int, length: int, decode: str
) -> None:
    """Prompts that take half of the quick one's time would take all of the slow one's."""
    policy = opened(few, fast=(Role.PREFILL, FAST), slow=(Role.PREFILL, SLOW), d=(Role.DECODE, FAST))
    picture = view(worker("fast", Role.PREFILL), worker("slow", Role.PREFILL), worker("d", Role.DECODE, running=2))
    now_s = 100.0
    for number in range(10):
        wanted = request(f"r{number}", length, 2000 * number, max_tokens=1)
        ask = Ask(picture, wanted, now_s=now_s)
        placement = policy.choose(ask)
        assert isinstance(placement, Placement) and placement.prefill_s is not None
        policy.began(ask, placement)
        policy.prefilled(wanted.key, now_s + placement.prefill_s)
        policy.ended(wanted.key, now_s + placement.prefill_s)
        now_s += 1.0
    placement = policy.choose(Ask(picture, request("last", 100, 90_000), now_s=now_s))
    assert isinstance(placement, Placement) and placement.decode == decode
