"""The simulated transport spends virtual time, and nothing else."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.offline.sim import clock
from kvtransfer.errors import PeerLost, TransferTimeout
from kvtransfer.links import TransportSet
from kvtransfer.open import LinkModel
from kvtransfer.transport import PullOrder, Region
from tests.kvtransfer.peers import LAYOUT, address_of, open_set, whole_piece

MODEL = LinkModel(latency_s=0.5, bytes_per_s=LAYOUT.block_bytes)  # a block a second


def run(story: Callable[[TransportSet], Coroutine[Any, Any, float]]) -> float:
    """Run `story` with a connected set; returns its result."""

    async def run() -> float:
        region = Region(LAYOUT, 64, address=0, owner=None)
        owner, reader = (open_set(region, ("simulated",), name, model=MODEL) for name in ("owner", "reader"))
        report = await reader.connect(address_of(owner, "owner"), deadline_s=1e6)
        assert report.latency_s == pytest.approx(0.5, rel=0.1)
        assert report.bytes_per_s == pytest.approx(MODEL.bytes_per_s, rel=0.1)
        try:
            return await story(reader)
        finally:
            await reader.close()

    return clock.run(run())


def test_a_probe_that_mostly_waits_reports_at_most_twice_the_bandwidth_that_it_saw() -> None:
    async def story() -> None:
        region = Region(LAYOUT, 64, address=0, owner=None)
        quick = LinkModel(latency_s=0.5, bytes_per_s=1e18)
        owner, reader = (open_set(region, ("simulated",), name, model=quick) for name in ("owner", "reader"))
        report = await reader.connect(address_of(owner, "owner"), deadline_s=1e6)
        seen = 64 * LAYOUT.block_bytes / quick.latency_s
        assert report.bytes_per_s == pytest.approx(2 * seen, rel=0.01)
        await reader.close()

    clock.run(story())


def order(num_blocks: int, deadline_s: float = 100.0) -> PullOrder:
    blocks = tuple(range(2, 2 + num_blocks))
    num_tokens = num_blocks * LAYOUT.block_size
    return PullOrder("owner", blocks, blocks, 0, num_tokens, ((whole_piece(), blocks),), deadline_s)


async def seconds_until(*futures: "asyncio.Future[Any]") -> float:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await asyncio.gather(*futures, return_exceptions=True)
    return loop.time() - begun


def test_a_read_takes_its_latency_and_its_bytes() -> None:
    assert run(lambda reader: seconds_until(reader.pull(order(10)).done)) == pytest.approx(10.5)


def test_reads_over_one_link_queue_behind_each_other() -> None:
    async def story(reader: TransportSet) -> float:
        return await seconds_until(*(reader.pull(order(2)).done for _ in range(3)))

    assert run(story) == pytest.approx(7.5)


def test_a_deadline_ends_a_simulated_read() -> None:
    async def story(reader: TransportSet) -> float:
        read = reader.pull(order(10, deadline_s=4.0))
        spent_s = await seconds_until(read.done, read.settled)
        assert isinstance(read.done.exception(), TransferTimeout)
        return spent_s

    assert run(story) == pytest.approx(4.0)


def test_forgetting_the_owner_loses_its_reads_at_once() -> None:
    async def story(reader: TransportSet) -> float:
        read = reader.pull(order(10))
        await asyncio.sleep(1.0)
        await reader.forget("owner")
        spent_s = await seconds_until(read.done, read.settled)
        assert isinstance(read.done.exception(), PeerLost)
        return spent_s

    assert run(story) == pytest.approx(0.0)
