"""The disk of a simulated worker: simulated seconds, deadlines, and what a simulated cluster finds on it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.clock import run
from cluster.offline.sim.run import simulate
from cluster.offline.workload.arrivals import Arrival, Workload
from tests.offline.sim.cases import ENGINE, colocated, models, tiered
from workers.executor.simulated_disk import SimulatedDisk

HASHES = [b"%016d" % number for number in range(64)]


def disk(slots: int = 32, host: dict[int, object] | None = None) -> SimulatedDisk:
    """A block takes each of 4 readers a second, and each of 2 writers half a second."""
    return SimulatedDisk(100 * slots, 100, 400, {} if host is None else host, lambda: None)


async def write(subject: SimulatedDisk, *hashes: bytes) -> list[bool]:
    done = [asyncio.get_running_loop().create_future() for _ in hashes]
    for place, block_hash in enumerate(hashes):
        subject.write(block_hash, None, place, done[place].set_result)
    return await asyncio.gather(*done)


async def read(subject: SimulatedDisk, *hashes: bytes, timeout_s: float = 10.0) -> list[tuple[bool, float]]:
    done = [asyncio.get_running_loop().create_future() for _ in hashes]
    for place, block_hash in enumerate(hashes):
        subject.read(block_hash, place, timeout_s, lambda *result, place=place: done[place].set_result(result))
    return await asyncio.gather(*done)


def virtual(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def in_virtual_time() -> None:
        run(test())  # type: ignore[arg-type]

    in_virtual_time.__name__ = test.__name__
    return in_virtual_time


@virtual
async def test_reads_take_the_disks_speed_and_wait_for_a_thread() -> None:
    subject = disk()
    assert await write(subject, *HASHES[:6]) == [True] * 6
    assert asyncio.get_running_loop().time() == pytest.approx(1.5), "three rounds of two"
    assert await read(subject, HASHES[0]) == [(True, pytest.approx(1.0))]
    assert await read(subject, *HASHES[:6]) == [(True, pytest.approx(s)) for s in (1, 1, 1, 1, 2, 2)]
    stats = subject.stats()
    assert (stats.blocks, stats.read_bytes, stats.written_bytes, stats.late) == (6, 700, 600, 0)


@virtual
async def test_a_read_past_its_deadline_is_a_miss_at_its_deadline() -> None:
    subject = disk()
    await write(subject, *HASHES[:9])
    results = await read(subject, *HASHES[:9], timeout_s=1.5)
    assert results == [(True, pytest.approx(1.0))] * 4 + [(False, pytest.approx(1.5))] * 5
    assert subject.stats().late == 5
    assert await read(subject, HASHES[0]) == [(True, pytest.approx(1.5))], "one thread is busy for half a second more"


@virtual
async def test_the_least_recently_used_block_makes_room_and_its_reader_is_told() -> None:
    host: dict[int, object] = {place: f"content {place}" for place in range(4)}
    subject, gone = disk(3, host), list[bytes]()
    assert subject.watch(lambda *_: None, gone.append) == {}
    await write(subject, *HASHES[:3])
    found: list[int] = []
    subject.find(HASHES[:1], 1.0, found.append)
    await write(subject, HASHES[3])
    subject.find(HASHES, 1.0, found.append)
    assert (found, gone) == ([1, 1], [HASHES[1]])
    subject.forget([HASHES[0]])
    assert gone == HASHES[1::-1] and await read(subject, HASHES[0]) == [(False, 0.0)]
    host.clear()
    await read(subject, HASHES[2])
    assert host == {0: "content 2"} and subject.stats().blocks == 2


@virtual
async def test_what_is_forgotten_while_it_is_written_is_not_there_and_a_full_queue_drops_writes() -> None:
    subject = disk(200)
    first = asyncio.ensure_future(write(subject, HASHES[0]))
    await asyncio.sleep(0.1)
    subject.forget(HASHES[:1])
    assert await first == [False]
    results = await write(subject, *[b"%016d" % number for number in range(100)])
    assert results.count(True) == 20, "66 are taken; ten rounds of two end within five seconds"
    assert subject.stats().dropped_blocks == 34 and subject.stats().late == 46
    subject._index.check()


@virtual
async def test_closing_ends_each_job_once_without_success() -> None:
    subject = disk()
    await write(subject, HASHES[0])
    jobs = asyncio.gather(read(subject, HASHES[0]), write(subject, HASHES[1]))
    await asyncio.sleep(0.1)
    subject.close()
    assert await jobs == [[(False, pytest.approx(0.1))], [False]]


def rounds(prompts: int = 6, again: int = 2) -> Workload:
    """Prompts of 128 blocks, one after another and then again."""
    prefixes = [tuple(range(4 * number, 4 * number + 4)) for number in range(prompts)] * again
    return Workload("rounds", tuple(Arrival(5.0 * place, 2048, 4, each) for place, each in enumerate(prefixes)))


def test_prompts_come_back_from_a_simulated_disk_and_a_faster_disk_brings_them_sooner() -> None:
    means = []
    for speed in (1_000_000_000, 4_000_000_000):
        spec = tiered(host=300, speed=speed)
        run = simulate(spec, models(spec), rounds())
        assert all(each.outcome is RequestOutcome.FINISHED for each in run.served)
        first, again = run.served[:6], run.served[6:]
        assert not any(each.cached_tokens for each in first) and all(each.cached_tokens for each in again)
        found = {each.name: each.hit_tokens for each in run.workers[0].sources}
        assert found == {"device": 0, "fetched": 0, "host": 0, "disk": sum(each.cached_tokens for each in again)}
        assert run.workers[0].sources[3].saved_s > 0.0
        mean_s = [sum(each.ttft_s or 0.0 for each in group) / 6 for group in (first, again)]
        assert mean_s[1] < mean_s[0]
        means.append(mean_s[1])
    assert means[1] < means[0]


def test_a_prompt_waits_no_longer_for_a_slow_disk_than_computing_takes() -> None:
    spec, none = tiered(speed=1000), colocated(engine=replace(ENGINE, kv_blocks=302))
    run, without = (simulate(each, models(each), rounds()) for each in (spec, none))
    for each, other in zip(run.served, without.served, strict=True):
        assert each.ttft_s is not None and other.ttft_s is not None and each.ttft_s < 2 * other.ttft_s
    assert not any(each.cached_tokens for each in run.served)
