"""Requests longer than every worker's pool: which worker serves one, and which hold a part of its KV."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from cluster.policy.active_requests import ActiveRequest
from cluster.policy.policy import open_policy
from cluster.policy.routing.lending import MAX_LENDERS, Lending
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import ROUTING, ClusterSpec, GatewaySpec, PoolSpec, Role
from diptych.view import ClusterView, WorkerState, WorkerView
from workers.config import EngineConfig, ParallelConfig
from workers.request import Request, SamplingParams
from workers.stats import WorkerStats

BLOCK, BLOCKS = 16, 100
POOL = BLOCK * BLOCKS  # tokens
TWO_RANKS = ParallelConfig(tensor=2)


def spec(**pool: Any) -> ClusterSpec:
    settings: dict[str, Any] = {"engine": EngineConfig(block_size=BLOCK, kv_blocks=BLOCKS)} | pool
    return ClusterSpec("m", (PoolSpec("mixed", Role.MIXED, **settings),))


def worker(name: str, free: int = BLOCKS, pool: str = "mixed", tokens: int = POOL) -> WorkerView:
    stats = WorkerStats(total_blocks=BLOCKS, free_blocks=free)
    return WorkerView(name, pool, Role.MIXED, WorkerState.READY, "1", capacity_tokens=tokens, stats=stats)


def ask(num_tokens: int, *workers: WorkerView, **fields: Any) -> PlacementQuery:
    request = Request("r", (1,) * num_tokens, SamplingParams(seed=1, max_tokens=10))
    return PlacementQuery(ClusterView(1, "c", None, workers), request, **fields)


@pytest.mark.parametrize("routing", sorted(ROUTING))
def test_every_router_lends_only_what_no_worker_holds(routing: str) -> None:
    policy = open_policy(replace(spec(), gateway=GatewaySpec(routing=routing)), 0)
    workers = [worker("a"), worker("b"), worker("c")]
    fits, long, longest = (policy.choose(ask(tokens, *workers)) for tokens in (POOL - 1, POOL, 3 * POOL))
    assert isinstance(fits, Placement) and not fits.lenders
    assert isinstance(long, Placement) and long.colocated and long.lenders == ("b", "c") and long.decode == "a"
    assert longest is None


def test_the_worker_with_most_free_memory_serves_it_and_the_next_ones_lend_first() -> None:
    workers = [worker("a", 60), worker("b", 100), worker("c", 90), worker("d", 25)]
    placement = Lending(spec()).choose(ask(POOL, *workers))
    assert placement is not None
    assert (placement.decode, placement.lenders) == ("b", ("c", "a"))  # d has nothing above the share it keeps


def borrowing(decode: str, prompt: int, **fields: Any) -> ActiveRequest:
    settings: dict[str, Any] = {"began_s": 0.0, "first_token_s": 9.0} | fields
    return ActiveRequest("b/0", decode, decode, prompt, prompt, 10, 1.0, **settings)


def test_a_request_waits_for_memory_that_earlier_ones_still_take() -> None:
    workers = [worker("a"), worker("b"), worker("c"), worker("d")]  # 4,800 tokens
    lending, now = Lending(spec()), ask(POOL, *workers, now_s=100.0)
    assert lending.choose(now, [borrowing("a", 3100, began_s=99.0)]) is not None
    assert lending.choose(now, [borrowing("a", 3300, began_s=99.0)]) is None  # statistics do not show it yet
    assert lending.choose(now, [borrowing("a", 3300)]) is not None  # no worker has prompt tokens left to compute
    busy = structs.replace(workers[0], stats=structs.replace(workers[0].stats, queued_tokens=3300))
    half = structs.replace(workers[0], stats=structs.replace(workers[0].stats, queued_tokens=1500))
    for first, is_placed in ((busy, False), (half, True)):
        placement = lending.choose(ask(POOL, first, *workers[1:], now_s=100.0), [borrowing("a", 3300)])
        assert (placement is not None) is is_placed
    decoding = borrowing("a", 3300, prefilled_s=50.0)
    assert lending.choose(ask(POOL, busy, *workers[1:], now_s=100.0), [decoding]) is not None


def test_each_worker_serves_one_of_them_before_another_serves_two() -> None:
    workers = [worker("a"), worker("b", 90), worker("c", 90), worker("d", 90)]
    placement = Lending(spec()).choose(ask(POOL, *workers, now_s=100.0), [borrowing("a", 100)])
    assert placement is not None
    assert (placement.decode, placement.lenders) == ("b", ("a", "c", "d"))


def test_workers_that_failed_or_are_not_linked_or_not_ready_do_not_lend() -> None:
    starting = structs.replace(worker("c"), state=WorkerState.STARTING)
    lending, workers = Lending(spec()), [worker("a"), worker("b"), starting, worker("d")]
    assert lending.choose(ask(POOL, *workers, avoid={"a"})).lenders == ("d",)  # type: ignore[union-attr]
    asked = ask(POOL, *workers)
    asked = replace(asked, view=replace(asked.view, unlinked=frozenset({("a", "b")})))
    assert lending.choose(asked).lenders == ("d",)  # type: ignore[union-attr]
    assert lending.choose(ask(POOL, worker("a"))) is None


def test_workers_with_odd_blocks_do_not_lend() -> None:
    lending = Lending(spec(engine=EngineConfig(block_size=48, kv_blocks=BLOCKS)))
    assert lending.choose(ask(POOL, worker("a"), worker("b"))) is None
    assert lending.longest([worker("a"), worker("b")]) == 0


def test_workers_of_several_ranks_lend_to_each_other_and_to_others() -> None:
    gang = PoolSpec("gang", Role.MIXED, engine=EngineConfig(block_size=BLOCK, kv_blocks=BLOCKS), parallel=TWO_RANKS)
    lending = Lending(ClusterSpec("m", (*spec().pools, gang)))
    for workers in ([worker("a", pool="gang"), worker("b", pool="gang")], [worker("a"), worker("b", pool="gang")]):
        placement = lending.choose(ask(POOL, *workers))
        assert placement is not None and (placement.decode, placement.lenders) == ("a", ("b",))
        assert lending.longest(workers) == POOL * 3 // 2


def test_workers_of_one_dtype_hold_three_quarters_of_their_memory_together() -> None:
    half = PoolSpec("half", Role.MIXED, engine=EngineConfig(block_size=BLOCK, kv_blocks=BLOCKS, dtype="bfloat16"))
    lending = Lending(ClusterSpec("m", (*spec().pools, half)))
    assert lending.longest([worker("a")]) == 0
    assert lending.longest([worker("a"), worker("h", pool="half")]) == 0
    assert lending.longest([worker("a"), worker("b"), worker("h", pool="half")]) == POOL * 3 // 2
    many = [worker(f"w{number}") for number in range(50)]
    assert lending.longest(many) == (MAX_LENDERS + 1) * POOL * 3 // 4
    placement = lending.choose(ask(3 * POOL, *many))
    assert placement is not None and len(placement.lenders) == MAX_LENDERS


def test_no_sequence_is_longer_than_the_engine_allows() -> None:
    engine = EngineConfig(block_size=BLOCK, kv_blocks=BLOCKS, max_model_len=POOL + 5)
    assert Lending(spec(engine=engine)).longest([worker("a"), worker("b")]) == POOL + 5
