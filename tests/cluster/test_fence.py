"""A NIXL fence, at either end, gives the pool new addresses: the next pull first repeats preflight."""

import asyncio

import pytest

from cluster.events import Completed
from kvtransfer.backends.nixl import NixlTransport
from tests.cluster.local import Cluster, cluster, split_spec
from tests.kvtransfer.conftest import need
from workers.request import Request, SamplingParams
from workers.worker import Worker


def nixl_of(worker: Worker) -> NixlTransport:
    [transport] = worker._executor._transports._transports  # type: ignore[attr-defined]
    assert isinstance(transport, NixlTransport)
    return transport


async def fence(worker: Worker) -> None:
    """What becomes of a worker one of whose reads never ends: its agent is destroyed and made anew."""
    pump = nixl_of(worker)._pump
    before = pump.address
    await asyncio.wrap_future(pump.submit(pump._fence))
    assert pump.address != before


async def ask(served: Cluster, number: int) -> None:
    """For an answer to a prompt that begins like no other."""
    prompt = tuple(range(100 * number + 1, 100 * number + 60))
    events = await served.run(Request(f"r{number}", prompt, SamplingParams(temperature=0, seed=0, max_tokens=4)))
    assert isinstance(events[-1], Completed)


@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
async def test_after_a_fence_no_pull_fails(side: str) -> None:
    need("nixl")
    async with cluster(split_spec(backends=("nixl",))) as served:
        decode = served.workers["decode-0"]
        await ask(served, 1)
        pulls = decode._kv_fetcher.pulls
        await fence(served.workers[side])
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
        await fence(prefill)
        await ask(served, 1)
        link = decode._peer_links._links[before.incarnation]
        assert link.peer != before
        await decode._peer_links.meet(before)
        assert decode._peer_links._links[before.incarnation] is link
        await ask(served, 2)
        assert decode._kv_fetcher.pulls.failed == 0
