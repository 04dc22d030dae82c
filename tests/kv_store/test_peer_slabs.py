"""Workers that share a path: what one has written, all of its fingerprint read; whatever goes wrong there is a miss."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.kv_store.slabs import BLOCK_BYTES, FINGERPRINT, WAIT_S, Hang, Opened, block_of, hash_of
from workers.kv_store import peer_slabs
from workers.kv_store.health import MAX_FAILURES
from workers.kv_store.kv_store import open_kv_store, store_bytes
from workers.kv_store.peer_slabs import PeerSlab
from workers.kv_store.shared_index import index_path
from workers.kv_store.slab import SLAB_FILES

LATE_S = 0.05
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_slabs, "LOOK_S", 0.002)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Opened, Opened]]:
    a, b = Opened(tmp_path), Opened(tmp_path, file=SLAB_FILES[1])
    yield a, b
    for each in (a, b):
        each.slab.on_read = each.slab.on_write = None
        await each.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


def has(opened: Opened, *numbers: int) -> bool:
    return opened.store.match([hash_of(number) for number in numbers]) == len(numbers)


async def test_what_a_peer_writes_is_found_and_read_and_not_written_again(pair: tuple[Opened, Opened]) -> None:
    a, b = pair
    assert await a.put(1, 2) == [True, True]
    assert await a.store.write(hash_of(3), memoryview(block_of(3)), 77)
    await until(lambda: has(b, 1, 2, 3))
    assert b.found == {hash_of(3): 77} and a.found == {}
    assert [await b.get(number) for number in (1, 2, 3)] == [block_of(number) for number in (1, 2, 3)]
    assert await b.put(2) == [False]
    stats = b.store.stats()
    assert (stats.reads, stats.peer_reads, stats.num_stored, stats.writes_dropped) == (3, 3, 0, 0)
    assert await b.put(4) == [True]
    assert has(b, 1, 4, 2), "its own and a peer's in one prompt"


async def test_what_a_peer_evicts_is_gone_unless_it_is_here_too(pair: tuple[Opened, Opened]) -> None:
    a, b = pair
    first, second = (each.store.write(hash_of(1), memoryview(block_of(1))) for each in pair)
    assert await first and await second, "at once: neither knew of the other"
    await a.put(2, 3, 4)
    await until(lambda: has(b, 1, 2, 3, 4))
    await a.put(5, 6)
    await until(lambda: has(b, 5, 6) and not has(b, 2))
    assert b.gone == [hash_of(2)] and await b.get(1) == block_of(1)
    await b.put(11, 12, 13, 14)
    assert hash_of(1) in b.gone and not has(b, 1)


async def test_what_is_here_and_at_a_peer_is_gone_when_both_have_lost_it(pair: tuple[Opened, Opened]) -> None:
    a, b = pair
    await asyncio.gather(*(each.store.write(hash_of(1), memoryview(block_of(1))) for each in pair))
    await until(lambda: hash_of(1) in b.store._peers)
    b.store.forget([hash_of(9)])
    await b.put(11, 12, 13, 14)
    assert hash_of(1) not in b.gone and await b.get(1) == block_of(1), "from the peer now"
    await a.put(21, 22, 23, 24)
    await until(lambda: hash_of(1) in b.gone)
    assert await b.get(1) is None


async def test_a_slot_that_its_owner_reuses_before_it_is_read_is_a_miss(
    pair: tuple[Opened, Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    await a.put(1, 2, 3, 4)
    await until(lambda: has(b, 1, 2, 3, 4))
    loop, really = asyncio.get_running_loop(), PeerSlab.read

    def read(self: PeerSlab, slot: int, buffer: memoryview) -> None:
        assert asyncio.run_coroutine_threadsafe(a.put(5), loop).result(WAIT_S) == [True]
        really(self, slot, buffer)

    monkeypatch.setattr(PeerSlab, "read", read)
    assert await b.get(1) is None
    monkeypatch.undo()
    stats = b.store.stats()
    assert (stats.corrupt, stats.read_failures, stats.stopped_peers) == (0, 0, ""), "no error"
    assert hash_of(1) in b.gone and await b.get(2) == block_of(2)


async def test_a_slot_that_is_half_written_when_it_is_read_is_a_miss(pair: tuple[Opened, Opened]) -> None:
    a, b = pair
    await a.put(1, 2, 3, 4)
    await until(lambda: has(b, 1))
    hang = Hang(a.slab.really_write)

    def write(buffer: memoryview, offset: int) -> int:
        a.slab.really_write(buffer[:4096], offset)
        return hang(buffer, offset)

    a.slab.on_write = write
    slots = dict(b.store._peers._peers[0].slots)
    writing = asyncio.ensure_future(a.put(5))
    await until(hang.begun.is_set)
    await until(lambda: not has(b, 1) and not has(b, 5))
    b.store._peers._peers[0].slots.update({hash_of(1): slots[hash_of(1)], hash_of(5): slots[hash_of(1)]})
    assert [await b.get(1), await b.get(5)] == [None, None]
    hang.release()
    assert await writing == [True]
    await until(lambda: has(b, 5))
    assert await b.get(5) == block_of(5)


async def test_what_is_forgotten_is_not_read_from_a_peer_and_written_again(pair: tuple[Opened, Opened]) -> None:
    a, b = pair
    await a.put(1, 2)
    await until(lambda: has(b, 1, 2))
    b.store.forget([hash_of(1)])
    assert b.gone == [hash_of(1)] and not has(b, 1) and await b.get(1) is None
    assert await b.put(1) == [True] and await b.get(1) == block_of(1)
    a.store.forget([hash_of(2)])
    await until(lambda: not has(b, 2))


async def test_a_slab_that_nobody_owns_is_read_and_another_fingerprint_is_not(tmp_path: Path) -> None:
    for number, fingerprint in enumerate((FINGERPRINT, bytes(32))):
        opened = Opened(tmp_path, fingerprint=fingerprint, file=SLAB_FILES[number])
        await opened.store.write(hash_of(number), memoryview(block_of(number)), number)
        await opened.close()
    opened = Opened(tmp_path, file=SLAB_FILES[2])
    assert opened.store.found_prefixes == {hash_of(0): 0}
    assert [await opened.get(0), await opened.get(1)] == [block_of(0), None]
    taken = Opened(tmp_path, fingerprint=bytes(32))
    await until(lambda: not has(opened, 0))
    assert opened.gone == [hash_of(0)], "a worker with another model has taken the slab"
    for each in (opened, taken):
        await each.close()


async def test_a_slab_that_is_removed_is_gone_and_one_in_its_place_is_found(tmp_path: Path) -> None:
    a, b = Opened(tmp_path), Opened(tmp_path, file=SLAB_FILES[1])
    await a.put(1)
    await until(lambda: has(b, 1))
    await a.close()
    for path in (a.slab.path, index_path(a.slab.path)):
        path.unlink()
    await until(lambda: not has(b, 1))
    a = Opened(tmp_path)
    await a.put(2)
    await until(lambda: has(b, 2))
    assert await b.get(2) == block_of(2)
    shutil.rmtree(tmp_path)
    await until(lambda: not has(b, 2))
    assert await b.put(3) == [True] and await b.get(3) == block_of(3), "its own file is open"
    for each in (a, b):
        await each.close()


async def test_two_workers_that_start_at_once_have_a_slab_each(tmp_path: Path) -> None:
    size = store_bytes(4, BLOCK_BYTES)
    starts = [asyncio.to_thread(open_kv_store, tmp_path, size, BLOCK_BYTES, FINGERPRINT) for _ in range(4)]
    stores = await asyncio.gather(*starts)
    assert {store.path.name for store in stores} == set(SLAB_FILES[:4])
    for store in stores:
        await store.close()


async def test_a_peers_slab_that_hangs_does_not_stop_its_own(
    pair: tuple[Opened, Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    await a.put(1, 2, 3)
    await b.put(4)
    await until(lambda: has(b, 1, 2, 3))
    hang = Hang(lambda *_: 0)
    monkeypatch.setattr(PeerSlab, "read", lambda self, slot, buffer: hang(buffer, slot))
    reads = [b.get(number, LATE_S) for number in (1, 2, 3, 1, 2, 3)]
    assert await asyncio.gather(*reads) == [None] * len(reads)
    stats = b.store.stats()
    assert "no answer in time" in stats.stopped_peers and not stats.stopped_reads
    assert set(b.gone) == {hash_of(1), hash_of(2), hash_of(3)} and not has(b, 1)
    assert await b.get(4) == block_of(4) and await b.put(1) == [True] and await b.get(1) == block_of(1)
    hang.release()


async def test_a_peers_slab_whose_reads_fail_is_no_longer_read(pair: tuple[Opened, Opened]) -> None:
    a, b = pair
    await a.put(1, 2, 3, 4)
    await until(lambda: has(b, 1, 2, 3, 4))
    os.truncate(a.slab.path, 4096)
    assert [await b.get(number) for number in range(1, 1 + MAX_FAILURES)] == [None] * MAX_FAILURES
    stats = b.store.stats()
    assert stats.read_failures == MAX_FAILURES and not has(b, 4) and not stats.stopped_reads
    assert str(a.slab.path) in stats.stopped_peers and hash_of(4) in b.gone


# Stores blocks 0 to 5 in a slab of 4 and then writes half of block 6, without an end.
PEER = """
import asyncio, sys, time
from pathlib import Path
from tests.kv_store.slabs import Opened

async def main(folder):
    opened = Opened(Path(folder), 4)
    await opened.put(*range(6))
    def write(buffer, offset):
        opened.slab.really_write(buffer[:8192], offset)
        print("torn", flush=True)
        time.sleep(600)
    opened.slab.on_write = write
    await opened.put(6)

asyncio.run(main(sys.argv[1]))
"""


def peer(folder: Path) -> "subprocess.Popen[bytes]":
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
    return subprocess.Popen([sys.executable, "-c", PEER, str(folder)], stdout=subprocess.PIPE, env=paths)


async def test_a_worker_reads_what_a_process_has_stored_also_after_kill_9_in_the_middle_of_a_write(
    tmp_path: Path,
) -> None:
    opened = Opened(tmp_path, file=SLAB_FILES[1])
    child = peer(tmp_path)
    assert child.stdout is not None
    try:
        assert (await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), WAIT_S)).strip() == b"torn"
        await until(lambda: has(opened, 3, 4, 5))
        assert [await opened.get(number) for number in (4, 2, 6)] == [block_of(4), None, None]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert [await opened.get(number) for number in range(7)] == [None, None, None, *map(block_of, (3, 4, 5)), None]
    await opened.close()
    later = Opened(tmp_path, file=SLAB_FILES[2])
    assert [await later.get(number) for number in range(7)] == [None, None, None, *map(block_of, (3, 4, 5)), None]
    await later.close()
