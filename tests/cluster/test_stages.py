"""Workers with pipelines behind the dispatcher: several plans in flight, KV pulled behind the watermark, cancels."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from cluster.events import Delta
from cluster.spec import ClusterSpec
from tests.cluster.local import cluster, completed, generate, request, split_spec, tokens_of
from workers.config import ParallelConfig
from workers.costs import LinearCost
from workers.executor.simulated import simulated_token

COST = LinearCost(0.002, 0.00002, 0.0, 0.0001, 0.0, 0.0, 0.0)


def staged(prefill: int, decode: int, **engine: Any) -> ClusterSpec:
    spec = split_spec(**engine)
    stages = {"prefill": prefill, "decode": decode}
    pools = tuple(replace(pool, parallel=ParallelConfig(pipeline=stages[pool.name])) for pool in spec.pools)
    return replace(spec, pools=pools)


@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (1, 3), (3, 2)])
async def test_pipelines_give_every_request_its_own_tokens_and_free_all_blocks(prefill: int, decode: int) -> None:
    draw = random.Random(0)
    asked = [request(f"r{n}", draw.randint(1, 150), first=20 * n, max_tokens=draw.randint(2, 20)) for n in range(16)]
    async with cluster(staged(prefill, decode, kv_blocks=100), COST) as subject:
        answers = await asyncio.gather(*map(subject.run, asked))
        for made, events in zip(asked, answers, strict=True):
            length, count = len(made.prompt), made.sampling.max_tokens
            assert count is not None
            assert tokens_of(events) == [simulated_token(f"{made.id}/0", length + n, 1000, (0,)) for n in range(count)]
            (report,) = completed(events).transfers
            assert report.digests_verified == report.num_blocks
            completed(events).ledger.check()
        await subject.settle()
        for worker, stages in zip(subject.workers.values(), (prefill, decode), strict=True):
            stats = worker._stats()
            assert (stats.bubble_share > 0.0) == (stages > 1)


async def test_streams_that_close_in_mid_flight_free_both_pipelines() -> None:
    async def first_delta(name: str) -> None:
        async with aclosing(generate(subject.dispatcher, request(name, 120, max_tokens=50))) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    return

    async with cluster(staged(3, 3, kv_blocks=60), COST) as subject:
        await asyncio.gather(*(first_delta(f"r{number}") for number in range(8)))
        await subject.settle()
