"""A NIXL fence, at either end, gives the pool new addresses: the next pull first repeats preflight."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.events import Completed
from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.links import TransportSet
from kvtransfer.ticket import ShardAddress
from tests.cluster.local import Cluster, cluster, split_spec
from tests.kvtransfer.conftest import need
from tests.model.tiny import write_tiny_llama
from workers.config import ParallelConfig
from workers.executor.rank import Rank
from workers.request import Request, SamplingParams
from workers.worker import Worker


async def fence(transports: TransportSet) -> None:
    """What becomes of a rank one of whose reads never ends: its agent is destroyed and made anew."""
    [transport] = transports._transports
    assert isinstance(transport, NixlTransport)
    pump = transport._pump
    before = pump.address
    await asyncio.wrap_future(pump.submit(pump._fence))
    assert pump.address != before


async def ask(served: Cluster, number: int) -> None:
    """For an answer to a prompt that begins like no other."""
    prompt = tuple(range(60 * number + 1, 60 * number + 60))
    events = await served.run(Request(f"r{number}", prompt, SamplingParams(temperature=0, seed=0, max_tokens=4)))
    assert isinstance(events[-1], Completed)


@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
async def test_after_a_fence_no_pull_fails(side: str) -> None:
    need("nixl")
    async with cluster(split_spec(backends=("nixl",))) as served:
        decode = served.workers["decode-0"]
        await ask(served, 1)
        pulls = decode._kv_fetcher.pulls
        await fence(served.workers[side]._executor._transports)  # type: ignore[attr-defined]
        await ask(served, 2)
        await ask(served, 3)
        await served.settle()
        assert decode._kv_fetcher.pulls.failed == pulls.failed == 0
        assert decode._kv_fetcher.pulls.arrived == pulls.arrived + 2


async def test_a_ticket_from_before_a_fence_is_read_over_the_new_link() -> None:
    need("nixl")
    async with cluster(split_spec(backends=("nixl",))) as served:
        prefill, decode = served.workers["prefill-0"], served.workers["decode-0"]
        before = prefill._peer_now()
        await fence(prefill._executor._transports)  # type: ignore[attr-defined]
        await ask(served, 1)
        link = decode._peer_links._links[before.incarnation]
        assert link.peer != before
        await decode._peer_links.meet(before)
        assert decode._peer_links._links[before.incarnation] is link
        await ask(served, 2)
        assert decode._kv_fetcher.pulls.failed == 0


@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
async def test_after_a_fence_of_a_further_rank_pulls_work_again_from_its_next_keepalive_on(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its worker does not know the new address: a pull fails, and its request is attempted again."""
    need("nixl")
    ranks: set[Rank] = set()
    shard = Rank.shard

    def known(rank: Rank) -> ShardAddress:
        ranks.add(rank)
        return shard(rank)

    monkeypatch.setattr(Rank, "shard", known)
    spec = split_spec(backends=("nixl",))
    engine = replace(spec.pools[0].engine, threads=1)
    pools = tuple(replace(each, engine=engine, parallel=ParallelConfig(2, 1)) for each in spec.pools)
    model = str(write_tiny_llama(tmp_path / "tiny"))
    async with cluster(replace(spec, model=model, executor="torch", pools=pools)) as served:
        decode, fenced = served.workers["decode-0"], served.workers[side]
        await ask(served, 0)
        before = address_of_further_rank(fenced)
        [further] = [each for each in ranks if shard(each) == before]
        await fence(further._transports)
        await ask(served, 1)
        async with asyncio.timeout(10.0):
            while address_of_further_rank(fenced) == before:
                await asyncio.sleep(0.01)
        await ask(served, 2)
        failed = decode._kv_fetcher.pulls.failed
        await ask(served, 3)
        await served.settle()
        assert decode._kv_fetcher.pulls.failed == failed <= 2


def address_of_further_rank(worker: Worker) -> ShardAddress:
    """As the first rank knows it."""
    return worker._executor.shards()[1]
