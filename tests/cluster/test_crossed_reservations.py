"""Two workers that prefill for each other do not wait forever for blocks that each reserved for the other's prompt."""

import asyncio
from dataclasses import replace

from cluster.offline.sim import clock
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import PoolSpec, Role
from tests.cluster.local import cluster, completed, request, split_spec, tokens_of
from workers.config import EngineConfig
from workers.executor.simulated import simulated_token

SMALL = EngineConfig(kv_blocks=22, block_size=16, max_batch_tokens=64, max_running=16)  # holds 320 tokens


def test_crossed_prompts_of_more_than_half_a_pool_are_answered() -> None:
    async def scene() -> None:
        spec = split_spec(backends=("simulated",))
        async with cluster(replace(spec, pools=(PoolSpec("mixed", Role.MIXED, 2, engine=SMALL),))) as subject:
            policy = subject.dispatcher._policy
            honest = policy.choose
            crossed = {"one": ("mixed-0", "mixed-1"), "two": ("mixed-1", "mixed-0")}

            def choose(query: PlacementQuery) -> Placement | None:
                found = honest(query) if query.request.attempt else Placement(*crossed[query.request.id], "a test")
                assert found is None or isinstance(found, Placement)
                return found

            policy.choose = choose
            wanted = [request(name, 200, max_tokens=20, first=n) for n, name in enumerate(crossed)]
            async with asyncio.timeout(10.0):
                received = await asyncio.gather(*map(subject.run, wanted))
            for each, events in zip(wanted, received, strict=True):
                assert tokens_of(events) == [simulated_token(f"{each.id}/0", 200 + n, 1000, (0,)) for n in range(20)]
            assert sum(completed(events).attempts for events in received) > 2, "otherwise this proves nothing"
            await subject.settle()

    clock.run(scene())
