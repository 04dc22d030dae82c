"""A KV store on a device that fails, hangs and returns other bytes: each is a miss, and never wrong bytes."""

import asyncio
import errno
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.kv_store.slabs import BLOCK_BYTES, FILE, WAIT_S, Hang, Opened, block_of, hash_of
from workers.kv_store import kv_store
from workers.kv_store.health import MAX_FAILURES
from workers.kv_store.io_threads import MAX_WRITES, READ_THREADS, WRITE_THREADS
from workers.kv_store.slot_format import PAGE_BYTES

LATE_S = 0.05


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    subject = Opened(tmp_path)
    yield subject
    subject.slab.on_read = subject.slab.on_write = None
    await subject.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


def fails(code: int) -> Callable[[memoryview, int], int]:
    def fail(buffer: memoryview, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return fail


async def test_what_is_written_is_read(opened: Opened) -> None:
    assert await opened.put(1, 2, 3) == [True] * 3
    assert await opened.put(2) == [False], "stored already"
    assert [await opened.get(number) for number in (1, 2, 3, 4)] == [block_of(1), block_of(2), block_of(3), None]
    hashes = [hash_of(number) for number in (1, 2, 4, 3)]
    assert opened.store.match(hashes) == 2
    stats = opened.store.stats()
    assert (stats.writes, stats.reads, stats.writes_dropped, stats.num_stored) == (3, 3, 0, 3)


async def test_a_full_store_gives_up_the_least_recently_used_and_says_so_before_it_writes(opened: Opened) -> None:
    await opened.put(1, 2, 3, 4)
    opened.store.match([hash_of(1)])
    told: list[list[bytes]] = []

    def write(buffer: memoryview, offset: int) -> int:
        told.append(list(opened.gone))
        return opened.slab.really_write(buffer, offset)

    opened.slab.on_write = write
    assert await opened.put(5, 6) == [True, True]
    assert told == [[hash_of(2)], [hash_of(2), hash_of(3)]]
    assert [await opened.get(number) is not None for number in range(1, 7)] == [True, False, False, True, True, True]


async def test_a_block_is_not_found_before_it_is_written(opened: Opened) -> None:
    opened.slab.on_write = hang = Hang(opened.slab.really_write)
    writing = opened.store.write(hash_of(1), memoryview(block_of(1)))
    await until(hang.begun.is_set)
    assert opened.store.match([hash_of(1)]) == 0 and await opened.get(1) is None
    hang.release()
    assert await writing and await opened.get(1) == block_of(1)


async def test_a_slot_that_is_being_read_is_not_reused(opened: Opened) -> None:
    await opened.put(1, 2, 3, 4)
    opened.slab.on_read = hang = Hang(opened.slab.really_read)
    reading = asyncio.ensure_future(opened.get(1))
    await until(hang.begun.is_set)
    assert await opened.put(5, 6, 7, 8, 9) == [True] * 5
    assert hash_of(1) in opened.store.block_hashes and hash_of(1) not in opened.gone
    hang.release()
    assert await reading == block_of(1)


async def test_all_slots_in_use_drop_a_write(opened: Opened) -> None:
    await opened.put(1, 2, 3, 4)
    opened.slab.on_read = hang = Hang(opened.slab.really_read)
    reading = [asyncio.ensure_future(opened.get(number)) for number in (1, 2, 3, 4)]
    await until(hang.begun.is_set)
    assert await opened.put(5) == [False] and opened.store.stats().writes_dropped == 1
    hang.release()
    assert await asyncio.gather(*reading) == [block_of(number) for number in (1, 2, 3, 4)]


async def test_a_forgotten_block_is_gone_and_its_reader_still_gets_it_whole(opened: Opened) -> None:
    await opened.put(1, 2, 3, 4)
    opened.slab.on_read = hang = Hang(opened.slab.really_read)
    reading = asyncio.ensure_future(opened.get(1))
    await until(hang.begun.is_set)
    opened.store.forget([hash_of(1), hash_of(9)])
    assert opened.gone == [hash_of(1)] and opened.store.match([hash_of(1)]) == 0
    hang.release()
    assert await reading in (block_of(1), None), "None: it was erased before it was read"
    await until(lambda: bool(opened.store._index._free))  # erased, which may come after the read
    assert await opened.put(5) == [True] and len(opened.gone) == 1, "into the slot that is free now"


async def test_a_block_that_is_forgotten_while_it_is_written_does_not_appear(opened: Opened) -> None:
    opened.slab.on_write = hang = Hang(opened.slab.really_write)
    writing = opened.store.write(hash_of(1), memoryview(block_of(1)))
    await until(hang.begun.is_set)
    opened.store.forget([hash_of(1)])
    hang.release()
    assert not await writing and await opened.get(1) is None
    assert await opened.put(1) == [True] and await opened.get(1) == block_of(1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
async def test_a_write_that_fails_stores_nothing(opened: Opened, code: int) -> None:
    await opened.put(1)
    opened.slab.on_write = fails(code)
    assert await opened.put(2) == [False]
    opened.slab.on_write = None
    assert [await opened.get(number) for number in (1, 2)] == [block_of(1), None]
    assert opened.store.stats().write_failures == 1 and not opened.store.stats().stopped_writes
    assert await opened.put(2) == [True] and await opened.get(2) == block_of(2)


async def test_a_write_that_ends_in_the_middle_stores_nothing(opened: Opened) -> None:
    """As when the disk is full: the system call writes a part and returns its length."""
    await opened.put(1, 2, 3, 4)
    opened.slab.on_write = lambda buffer, offset: opened.slab.really_write(buffer[:PAGE_BYTES], offset)
    assert await opened.put(5) == [False]
    opened.slab.on_write = None
    assert [await opened.get(number) for number in (1, 5, 2)] == [None, None, block_of(2)]
    assert opened.store.stats().write_failures == 1


async def test_a_device_whose_writes_fail_is_no_longer_written_to(opened: Opened) -> None:
    await opened.put(1)
    opened.slab.on_write = fails(errno.EIO)
    assert await opened.put(*range(2, 2 + MAX_FAILURES)) == [False] * MAX_FAILURES
    stats = opened.store.stats()
    assert stats.write_failures == MAX_FAILURES and "Input/output error" in stats.stopped_writes
    opened.slab.on_write = None
    assert await opened.put(9) == [False] and opened.store.stats().writes_dropped == 1
    assert await opened.get(1) == block_of(1), "reads go on"


async def test_a_read_that_fails_is_a_miss_and_so_is_the_block_afterwards(opened: Opened) -> None:
    await opened.put(1, 2)
    opened.slab.on_read = fails(errno.EIO)
    assert await opened.get(1) is None
    opened.slab.on_read = None
    assert [await opened.get(number) for number in (1, 2)] == [None, block_of(2)]
    assert opened.gone == [hash_of(1)] and opened.store.stats().read_failures == 1


async def test_a_device_whose_reads_fail_is_no_longer_read(opened: Opened) -> None:
    await opened.put(1, 2, 3, 4)
    opened.slab.on_read = fails(errno.EIO)
    assert [await opened.get(number) for number in range(1, 1 + MAX_FAILURES)] == [None] * MAX_FAILURES
    opened.slab.on_read = None
    assert await opened.get(4) is None and opened.store.match([hash_of(4)]) == 0
    assert "Input/output error" in opened.store.stats().stopped_reads


async def test_what_is_stored_is_gone_when_reads_stop(opened: Opened) -> None:
    await opened.put(1, 2, 3, 4)
    opened.slab.on_read = fails(errno.EIO)
    for number in (1, 2, 3):
        await opened.get(number)
    assert set(opened.gone) == set(map(hash_of, (1, 2, 3, 4))) and opened.store.stats().stopped_reads
    assert not await opened.store.write(hash_of(5), memoryview(block_of(5))), "nobody can read what is written now"


async def test_the_rate_of_reads_is_measured_on_slots_without_a_block(opened: Opened) -> None:
    assert 0 < opened.store.read_byte_s < math.inf
    await opened.put(1)
    opened.slab.measure_reads([1, 2, 3], 2)
    opened.slab.measure_reads([], 2)
    assert await opened.get(1) == block_of(1)
    opened.slab.on_read = fails(errno.EIO)
    assert opened.slab.measure_reads([1], 2) == math.inf


async def test_a_read_that_hangs_is_a_miss_at_its_deadline_and_leaves_the_target_alone(opened: Opened) -> None:
    await opened.put(1, 2)
    opened.slab.on_read = hang = Hang(opened.slab.really_read)
    target = bytearray(BLOCK_BYTES)
    assert not await opened.store.read(hash_of(1), memoryview(target), LATE_S)
    hang.release()
    opened.slab.on_read = None
    assert await opened.get(2) == block_of(2)
    await until(lambda: not opened.store._index._pins)
    assert target == bytes(BLOCK_BYTES), "the read came back, too late"
    assert await opened.get(1) == block_of(1) and opened.store.stats().late == 1


async def test_a_device_that_hangs_delays_a_few_reads_and_then_none(opened: Opened) -> None:
    await opened.put(1)
    opened.slab.on_read = hang = Hang(opened.slab.really_read)
    waits = [opened.get(1, LATE_S) for _ in range(READ_THREADS + MAX_FAILURES)]
    assert await asyncio.gather(*waits) == [None] * len(waits)
    assert opened.store.stats().stopped_reads == "no answer in time"
    async with asyncio.timeout(WAIT_S / 2):
        assert await opened.get(1, WAIT_S) is None, "at once"
    hang.release()


async def test_reads_that_are_late_on_a_device_that_works_do_not_stop_it(opened: Opened) -> None:
    """More reads than it can serve in their time: those that waited are misses, the device is not at fault."""
    await opened.put(1, 2)
    slow = threading.Lock()

    def read(buffer: memoryview, offset: int) -> int:
        with slow:
            time.sleep(LATE_S / 4)
            return opened.slab.really_read(buffer, offset)

    opened.slab.on_read = read
    found = await asyncio.gather(*(opened.get(1 + number % 2, LATE_S) for number in range(40)))
    assert found.count(None) > MAX_FAILURES
    if found.count(None) < len(found):  # one was in time
        assert not opened.store.stats().stopped_reads


async def test_a_cancelled_reader_gets_its_memory_back_at_once(opened: Opened) -> None:
    await opened.put(1)
    opened.slab.on_read = hang = Hang(opened.slab.really_read)
    target = bytearray(BLOCK_BYTES)
    reading = asyncio.ensure_future(opened.store.read(hash_of(1), memoryview(target), WAIT_S))
    await until(hang.begun.is_set)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    hang.release()
    await until(lambda: not opened.store._index._pins)
    assert target == bytes(BLOCK_BYTES) and await opened.get(1) == block_of(1)


async def test_a_write_that_hangs_releases_its_memory_and_a_full_queue_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "WRITE_TIMEOUT_S", LATE_S)
    opened = Opened(tmp_path, 2 * MAX_WRITES)
    opened.slab.on_write = hang = Hang(opened.slab.really_write)
    blocks = [bytearray(block_of(number)) for number in range(WRITE_THREADS + MAX_WRITES + 1)]
    writes = [opened.store.write(hash_of(number), memoryview(blocks[number])) for number in range(WRITE_THREADS)]
    await until(opened.store._writers._queue.empty)
    writes += [
        opened.store.write(hash_of(number), memoryview(blocks[number])) for number in range(WRITE_THREADS, len(blocks))
    ]
    assert writes[-1].done() and opened.store.stats().writes_dropped == 1, "the queue is full: not waited for"
    async with asyncio.timeout(WAIT_S / 2):
        assert not any(await asyncio.gather(*writes))
    for block in blocks:
        block[:] = bytes(BLOCK_BYTES)  # what was copied before this is intact, what was not is never written
    assert opened.store.stats().stopped_writes == "no answer in time"
    hang.release()
    await until(lambda: not opened.store._index._writing and not opened.store._index._pins)
    assert not opened.store.block_hashes
    await opened.close()


def corrupt(folder: Path, offset: int) -> None:
    """Flip one bit; the size stays."""
    with (folder / FILE).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("place", [0, 20, 60, 70, PAGE_BYTES, PAGE_BYTES + BLOCK_BYTES - 1])
async def test_a_flipped_bit_is_a_miss(opened: Opened, tmp_path: Path, place: int) -> None:
    await opened.put(1, 2)
    slot = opened.store._index.slot_of(hash_of(1))
    assert slot is not None
    corrupt(tmp_path, opened.slab.offset(slot) + place)
    assert [await opened.get(1), await opened.get(2)] == [None, block_of(2)]
    assert opened.store.stats().corrupt == 1 and opened.gone == [hash_of(1)]
    assert await opened.put(1) == [True] and await opened.get(1) == block_of(1), "computed and stored again"


async def test_right_bytes_under_a_wrong_name_are_a_miss(opened: Opened) -> None:
    """A device that reads another place than it was told: an intact slot, of another block."""
    await opened.put(1, 2)
    slots = [opened.store._index.slot_of(hash_of(number)) for number in (1, 2)]
    first, second = (opened.slab.offset(slot) for slot in slots if slot is not None)
    opened.slab.on_read = lambda buffer, offset: opened.slab.really_read(buffer, second if offset == first else offset)
    assert [await opened.get(1), await opened.get(2)] == [None, block_of(2)]
    assert opened.store.stats().corrupt == 1


async def test_a_closed_store_misses_and_a_hanging_device_does_not_keep_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "CLOSE_TIMEOUT_S", LATE_S)
    opened = Opened(tmp_path)
    await opened.put(1)
    opened.slab.on_read = hang = Hang(opened.slab.really_read)
    reading = asyncio.ensure_future(opened.get(1))
    await until(hang.begun.is_set)
    await opened.store.close()
    assert await reading is None and await opened.get(1) is None and await opened.put(2) == [False]
    os.fstat(opened.slab._file)  # still open: the read may yet return
    hang.release()
    await until(lambda: not opened.store._index._pins)
    opened.slab.close()
