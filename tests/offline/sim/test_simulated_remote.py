"""The remote server of simulated workers: what they share, what its network takes, what a simulated cluster finds."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.run import simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.spec import ClusterSpec
from tests.offline.sim.cases import BLOCK_BYTES, ENGINE, colocated, models
from tests.offline.sim.test_simulated_disk import virtual
from workers.config import ByteSize, CacheConfig, RemoteCacheConfig
from workers.executor.simulated_remote import ROUND_TRIP_S, SimulatedRemote, SimulatedRemoteServer

HASHES = [b"%016d" % number for number in range(64)]


class Clients:
    """Workers of one server, to which a block takes a second, in each direction. `content`: in their host blocks."""

    def __init__(self, *keys: str, blocks: int = 32) -> None:
        server = SimulatedRemoteServer(100 * blocks, 100)
        self.content: list[dict[int, object]] = [{} for _ in keys]
        self.gone: list[list[bytes]] = [[] for _ in keys]
        self.added: list[list[tuple[bytes, int]]] = [[] for _ in keys]
        self.each = [
            SimulatedRemote(server, key, 100, self.content[place], lambda: None) for place, key in enumerate(keys)
        ]
        for place, client in enumerate(self.each):
            client.watch(partial(self._add, place), self.gone[place].append)

    def _add(self, place: int, block_hash: bytes, prefix: int) -> None:
        self.added[place].append((block_hash, prefix))

    async def write(self, client: int, *hashes: bytes) -> list[bool]:
        done = [asyncio.get_running_loop().create_future() for _ in hashes]
        for place, block_hash in enumerate(hashes):
            self.each[client].write(block_hash, 7, place, done[place].set_result)
        return await asyncio.gather(*done)

    async def read(self, client: int, *hashes: bytes, timeout_s: float = 10.0) -> list[tuple[bool, float]]:
        done = [asyncio.get_running_loop().create_future() for _ in hashes]
        for place, block_hash in enumerate(hashes):
            self.each[client].read(
                block_hash, place, timeout_s, lambda *result, place=place: done[place].set_result(result)
            )
        return await asyncio.gather(*done)

    async def find(self, client: int, *hashes: bytes) -> int:
        done = asyncio.get_running_loop().create_future()
        self.each[client].find(hashes, 1.0, done.set_result)
        return await done


def after(seconds: float) -> tuple[bool, object]:
    return True, pytest.approx(seconds + ROUND_TRIP_S)


@virtual
async def test_what_one_worker_has_written_others_of_the_same_blocks_find() -> None:
    subject = Clients("a", "a", "b")
    subject.content[0][0] = "content"
    assert await subject.write(0, HASHES[0]) == [True]
    assert await subject.find(1, *HASHES[:2]) == 1 and await subject.find(2, *HASHES[:2]) == 0
    assert await subject.read(1, *HASHES[:1]) == [after(1.0)]
    assert subject.content[1] == {0: "content"} and subject.added[1] == [(HASHES[0], 7)] and not subject.added[0]
    assert await subject.write(1, HASHES[0]) == [True] and subject.each[1].stats().written_bytes == 0, "not sent again"
    subject.each[0].forget(HASHES[:1])
    assert subject.gone[0] == HASHES[:1] and await subject.find(1, HASHES[0]) == 0
    assert subject.gone[1] == HASHES[:1]


@virtual
async def test_workers_share_the_network_of_each_direction() -> None:
    subject = Clients("a", "a")
    assert await subject.write(0, *HASHES[:4]) == [True] * 4
    begun_s = asyncio.get_running_loop().time()
    reads = await asyncio.gather(
        subject.read(0, *HASHES[:2]), subject.read(1, *HASHES[2:4]), subject.write(0, HASHES[9])
    )
    assert reads == [[after(1), after(2)], [after(3), after(4)], [True]]
    assert asyncio.get_running_loop().time() == pytest.approx(begun_s + 4 + ROUND_TRIP_S)
    assert await subject.read(1, *HASHES[:3], timeout_s=1.5) == [after(1), (False, 1.5), (False, 1.5)]
    assert subject.each[1].stats().late == 2


@virtual
async def test_a_full_server_drops_what_was_used_least_recently() -> None:
    subject = Clients("a", "a", blocks=2)
    await subject.write(0, *HASHES[:2])
    await subject.find(1, HASHES[0])
    await subject.write(0, HASHES[2])
    assert [await subject.find(1, block_hash) for block_hash in HASHES[:3]] == [1, 0, 1]
    assert await subject.read(0, HASHES[1]) == [(False, pytest.approx(1 + ROUND_TRIP_S))]
    assert subject.gone[0] == [HASHES[1]]


@virtual
async def test_closing_ends_each_job_once_without_success_and_what_is_stored_stays() -> None:
    subject = Clients("a", "a")
    await subject.write(0, HASHES[0])
    jobs = asyncio.gather(subject.read(0, HASHES[0]), subject.write(0, HASHES[1]), subject.find(0, HASHES[0]))
    await asyncio.sleep(ROUND_TRIP_S / 2)
    subject.each[0].close()
    assert await jobs == [[(False, pytest.approx(ROUND_TRIP_S / 2))], [False], 0]
    assert await subject.find(1, *HASHES[:2]) == 1


@virtual
async def test_what_is_forgotten_while_it_is_written_is_not_there() -> None:
    subject = Clients("a")
    writing = asyncio.ensure_future(subject.write(0, HASHES[0]))
    await asyncio.sleep(0.1)
    subject.each[0].forget(HASHES[:1])
    assert await writing == [False] and await subject.find(0, HASHES[0]) == 0


def shared(workers: int, *, speed: int, url: str = "redis://a:6379/0") -> ClusterSpec:
    """Room for 300 blocks on each device, for as many in host memory, and a server."""
    (pool,) = colocated(workers, engine=replace(ENGINE, kv_blocks=302)).pools
    remote = RemoteCacheConfig(url, speed=ByteSize(speed), size=ByteSize(1000 * BLOCK_BYTES))
    cache = CacheConfig(ByteSize(300 * BLOCK_BYTES), remote=remote)
    return replace(colocated(), pools=(replace(pool, cache=cache),))


def test_simulated_workers_find_what_others_have_stored_and_a_faster_server_brings_it_sooner() -> None:
    prefixes = [tuple(range(4 * number, 4 * number + 4)) for number in range(6)] * 3
    rounds = Workload("rounds", tuple(Arrival(5.0 * place, 2048, 4, each) for place, each in enumerate(prefixes)))
    means = []
    for speed in (300_000_000, 3_000_000_000):
        spec = shared(2, speed=speed)
        spec = replace(spec, gateway=replace(spec.gateway, routing="round-robin"))
        run = simulate(spec, models(spec), rounds)
        assert all(each.outcome is RequestOutcome.FINISHED for each in run.served)
        assert not any(each.cached_tokens for each in run.served[:6])
        read = [{each.name: each.hit_tokens for each in worker.sources}["remote"] for worker in run.workers]
        assert all(read), "also what the other one has written"
        assert run.served == simulate(spec, models(spec), rounds).served, "to the bit"
        means.append(sum(each.ttft_s or 0.0 for each in run.served[6:]) / 12)
    assert means[1] < means[0] < sum(each.ttft_s or 0.0 for each in run.served[:6]) / 6
