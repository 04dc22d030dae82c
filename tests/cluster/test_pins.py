"""Prompts that are warmed and pinned on the workers of a cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from diptych.view import CachedPrompt
from tests.cluster.local import Cluster, cluster, completed, mixed_spec, request, split_spec
from workers.config import ByteSize, CacheConfig
from workers.errors import InvalidRequest, Overloaded

BLOCK_BYTES = 737_280  # sixteen tokens of a simulated worker
SYSTEM = request("system", 160, first=5)


@asynccontextmanager
async def cached_cluster(max_pinned: int = 20) -> AsyncIterator[Cluster]:
    """A worker with 38 blocks on its device and 100 in host memory."""
    spec = mixed_spec(kv_blocks=40)
    cache = CacheConfig(ByteSize(100 * BLOCK_BYTES), pins=ByteSize(max_pinned * BLOCK_BYTES))
    async with cluster(replace(spec, pools=(replace(spec.pools[0], cache=cache),))) as subject:
        yield subject


async def test_a_pinned_prompt_survives_other_prompts_until_its_end() -> None:
    async with cached_cluster() as subject:
        assert await subject.dispatcher.warm(SYSTEM, "", 3600.0) == (CachedPrompt("mixed-0", 160),)
        for number in range(8):
            await subject.run(request(f"flood{number}", 480, first=300 * (number % 3) + 7 * number))
        (worker,) = subject.workers.values()
        assert worker.engine.stats().tiers[0].pinned_blocks == 10
        events = await subject.run(replace(SYSTEM, id="again", prompt=(*SYSTEM.prompt, 7)))
        assert completed(events).cached_tokens == 160
        assert await subject.dispatcher.unpin(SYSTEM, "mixed") == (CachedPrompt("mixed-0", 160),)
        assert await subject.dispatcher.unpin(None, "") == (CachedPrompt("mixed-0", 0),)
        await worker.check()


async def test_a_pin_expires_on_an_idle_worker() -> None:
    async with cached_cluster() as subject:
        await subject.dispatcher.warm(SYSTEM, "", 0.2)
        (worker,) = subject.workers.values()
        async with asyncio.timeout(20):
            while len(worker.engine.pool.host.pins):
                await asyncio.sleep(0.05)
        assert worker.engine.cached_tokens(SYSTEM) == 160


async def test_a_prompt_can_be_warmed_without_a_pin() -> None:
    async with cluster(split_spec(2, 1)) as subject:
        warmed = await subject.dispatcher.warm(SYSTEM, "", 0.0)
        assert warmed == (CachedPrompt("prefill-0", 160), CachedPrompt("prefill-1", 160)), "not where only decodes run"
        events = await subject.run(replace(SYSTEM, id="again", prompt=(*SYSTEM.prompt, 7)))
        assert completed(events).cached_tokens == 160
        for pool in ("decode", "nowhere"):
            with pytest.raises(InvalidRequest, match=f"pool '{pool}' has no ready worker that prefills"):
                await subject.dispatcher.warm(SYSTEM, pool, 0.0)


async def test_a_worker_that_refuses_is_part_of_the_answer() -> None:
    async with cached_cluster(max_pinned=5) as subject:
        (refused,) = await subject.dispatcher.warm(SYSTEM, "", 60.0)
        assert refused.tokens == 0 and "needs 5 blocks more than may be pinned" in refused.problem
        assert not subject.workers["mixed-0"].engine.has_work


async def test_a_prompt_that_fails_is_part_of_the_answer() -> None:
    async with cached_cluster() as subject:
        unseeded = replace(SYSTEM, sampling=replace(SYSTEM.sampling, seed=None))
        (failed,) = await subject.dispatcher.warm(unseeded, "", 60.0)
        assert failed.tokens == 0 and failed.problem.startswith(
            "the prompt was not computed: unexpected AssertionError"
        )
        assert not subject.workers["mixed-0"].engine.has_work


async def test_a_prompt_that_is_not_computed_in_time_leaves_nothing_behind() -> None:
    async with cached_cluster() as subject:
        (worker,) = subject.workers.values()
        with pytest.raises(Overloaded, match=r"was not computed within 0 s"):
            await worker.warm(SYSTEM, 0.0, 0.0)
        async with asyncio.timeout(20):
            while worker.engine.has_work:
                await asyncio.sleep(0.01)
        await worker.check()
