"""Cached prefixes of tenants: each finds its own on every path, and others' only with `share_prefixes`."""

from dataclasses import replace

import pytest

from tests.cluster.local import Cluster, cluster, completed, mixed_spec, request, split_spec
from workers.config import ByteSize, CacheConfig
from workers.request import Request

PROMPT = request("r", 400, first=5)


async def cached(subject: Cluster, name: str, asked: Request) -> int:
    events = await subject.run(replace(asked, id=name))
    return completed(events).cached_tokens


@pytest.mark.parametrize("routing", ["least-loaded", "mooncake", "mooncake-local", "slo"])
async def test_a_tenant_finds_only_its_own_prefixes(routing: str) -> None:
    spec = split_spec(2, 1)
    spec = replace(spec, gateway=replace(spec.gateway, routing=routing))
    async with cluster(spec) as subject:
        for tenant in ("bank", "", "eve"):
            asked = replace(PROMPT, tenant=tenant)
            assert await cached(subject, f"first-{tenant}", asked) == 0
        for tenant in ("bank", "", "eve"):
            again = [await cached(subject, f"{n}-{tenant}", replace(PROMPT, tenant=tenant)) for n in range(3)]
            assert max(again) == 384, "of two prefill workers one at least has it"
        await subject.settle()


async def test_tenants_that_share_prefixes_find_each_others() -> None:
    async with cluster(mixed_spec()) as subject:
        alice = replace(PROMPT, tenant="alice", shares_prefixes=True)
        assert await cached(subject, "a", alice) == 0
        assert await cached(subject, "b", replace(alice, tenant="bob")) == 384
        assert await cached(subject, "c", PROMPT) == 384, "without a tenant likewise"
        assert await cached(subject, "d", replace(alice, tenant="eve", shares_prefixes=False)) == 0


async def test_the_host_cache_is_separate_per_tenant() -> None:
    spec = mixed_spec(kv_blocks=40)
    pool = replace(spec.pools[0], cache=CacheConfig(ByteSize.parse("80MiB")))  # more than a hundred blocks
    async with cluster(replace(spec, pools=(pool,))) as subject:
        mine, others = replace(PROMPT, tenant="bank"), request("fill", 500, first=600)
        assert await cached(subject, "a", mine) == 0
        assert await cached(subject, "b", others) == 0, "takes the device's blocks"
        assert await cached(subject, "c", replace(PROMPT, tenant="eve")) == 0
        assert await cached(subject, "d", mine) == 384
        assert await cached(subject, "e", replace(others, tenant="eve")) == 0, "takes them again"
        assert await cached(subject, "f", mine) == 384
