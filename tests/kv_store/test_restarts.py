"""What a KV store finds when it is opened again: after a close, kill -9, another model, or damage of any kind."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout import KVLayout
from tests.kv_store.slabs import (
    BLOCK_BYTES,
    FILE,
    FINGERPRINT,
    SLOT_BYTES,
    WAIT_S,
    FaultySlab,
    Opened,
    block_of,
    file_bytes,
    hash_of,
)
from workers.kv_store import slot_format
from workers.kv_store.kv_store import open_kv_store, store_bytes
from workers.kv_store.slab import SLAB_FILES
from workers.kv_store.slot_format import PAGE_BYTES, decode_header, encode_header, fingerprint

ROOT = Path(__file__).resolve().parents[2]


async def restarted(folder: Path, num_slots: int, numbers: Iterable[int], fingerprint: bytes = FINGERPRINT) -> set[int]:
    """Open the folder; returns which blocks can be read, and these must be right. Then write to every slot."""
    opened = Opened(folder, num_slots, fingerprint)
    claimed = {number for number in numbers if hash_of(number) in opened.store.block_hashes}
    found = set()
    for number in numbers:
        block = await opened.get(number)
        assert block in (None, block_of(number)), f"wrong bytes for block {number}"
        if block is not None:
            found.add(number)
    assert found <= claimed
    await opened.close()  # damaged slots are erased by now; before, a write might have found no slot
    opened = Opened(folder, num_slots, fingerprint)
    fresh = range(1000, 1000 + num_slots)
    assert all(await opened.put(*fresh)), "damaged slots are used again"
    assert [await opened.get(number) for number in fresh] == [block_of(number) for number in fresh]
    await opened.close()
    return found


async def filled(folder: Path, *numbers: int, num_slots: int = 4) -> None:
    opened = Opened(folder, num_slots)
    await opened.put(*numbers)
    await opened.close()


async def test_blocks_survive_a_restart_and_the_oldest_is_still_evicted_first(tmp_path: Path) -> None:
    await filled(tmp_path, 1, 2, 3, 4, 5)
    opened = Opened(tmp_path)
    assert opened.store.block_hashes == tuple(map(hash_of, (2, 3, 4, 5))) and opened.store.stats().recovered == 4
    assert [await opened.get(number) for number in (2, 5)] == [block_of(2), block_of(5)]
    await opened.put(6)
    assert opened.gone == [hash_of(2)]
    await opened.close()


async def test_the_names_of_prefixes_survive_a_restart(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    for number, prefix in ((1, 7), (2, None), (3, (1 << 60) - 1)):
        assert await opened.store.write(hash_of(number), memoryview(block_of(number)), prefix)
    await opened.close()
    opened = Opened(tmp_path)
    assert opened.store.found_prefixes == {hash_of(1): 7, hash_of(3): (1 << 60) - 1}
    await opened.close()


async def test_recovery_reads_headers_only(tmp_path: Path) -> None:
    await filled(tmp_path, 1, 2, 3)
    pages: list[int] = []

    class CountingSlab(FaultySlab):
        def _pread(self, buffer: memoryview, offset: int) -> int:
            pages.append(len(buffer))
            return super()._pread(buffer, offset)

    slab = CountingSlab(tmp_path, 4)
    pages.clear()
    found = slab.scan(lambda page: decode_header(page, FINGERPRINT, BLOCK_BYTES))
    assert sorted(header.block_hash for _, header in found) == sorted(map(hash_of, (1, 2, 3)))
    assert pages == [PAGE_BYTES] * 4
    slab.close()


async def test_blocks_of_another_fingerprint_size_or_format_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(tmp_path, 1, 2, 3, 4)
    assert await restarted(tmp_path, 4, range(1, 5), fingerprint=bytes(32)) == set()
    await filled(tmp_path, 1, 2, 3, 4)
    monkeypatch.setattr(slot_format, "FORMAT", slot_format.FORMAT + 1)
    assert await restarted(tmp_path, 4, range(1, 5)) == set()


async def test_a_smaller_file_keeps_what_still_fits(tmp_path: Path) -> None:
    await filled(tmp_path, 1, 2, 3, 4)
    assert len(await restarted(tmp_path, 2, range(1, 5))) == 2


async def test_a_forgotten_block_does_not_come_back(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    await opened.put(1, 2)
    opened.store.forget([hash_of(1)])
    await opened.close()
    assert await restarted(tmp_path, 4, [1, 2]) == {2}


async def test_an_older_copy_of_a_block_does_not_come_back_after_the_newer_one(tmp_path: Path) -> None:
    """Two slots have one block hash: a crash left the older one. What is forgotten is forgotten in both."""
    await filled(tmp_path, 1, 2)
    data = bytearray((tmp_path / FILE).read_bytes())
    first, third = PAGE_BYTES, PAGE_BYTES + 2 * SLOT_BYTES
    data[third : third + SLOT_BYTES] = data[first : first + SLOT_BYTES]
    (tmp_path / FILE).write_bytes(data)
    opened = Opened(tmp_path)
    assert len(opened.store.block_hashes) == 2
    opened.store.forget([hash_of(1), hash_of(2)])
    await opened.close()
    assert await restarted(tmp_path, 4, [1, 2]) == set()


def test_a_fingerprint_differs_with_whatever_changes_the_bytes() -> None:
    layout = KVLayout("weights", num_layers=4, num_kv_heads=2, head_dim=8, block_size=16)
    others = [
        fingerprint(replace(layout, model="other weights")),
        fingerprint(replace(layout, dtype="bfloat16")),
        fingerprint(replace(layout, block_size=32)),
        fingerprint(replace(layout, heads=(0, 1))),
        fingerprint(replace(layout, layers=(2, 4))),
        fingerprint(layout, "0.1.0"),
        fingerprint(layout, "0.1.1"),
    ]
    assert len({fingerprint(layout), *others}) == len(others) + 1
    assert fingerprint(layout) == fingerprint(replace(layout))


Damage = tuple[str, int, int]
DAMAGE = st.tuples(
    st.sampled_from(["flip", "zero", "noise", "swap", "cut", "older", "hash"]),
    st.integers(0, file_bytes(4) - 1),
    st.integers(0, 3),
)


def damage(data: bytearray, how: str, place: int, slot: int) -> None:
    start = PAGE_BYTES + slot * SLOT_BYTES
    data += bytes(file_bytes(4) - len(data))
    if how == "flip":
        data[place] ^= 1 << place % 8
    elif how in ("zero", "noise"):
        end = min(len(data), place + 3000)
        data[place:end] = bytes(end - place) if how == "zero" else random.Random(place).randbytes(end - place)
    elif how == "swap":  # an intact slot lies where another one was
        other = PAGE_BYTES + place % 4 * SLOT_BYTES
        data[start : start + SLOT_BYTES] = data[other : other + SLOT_BYTES]
    elif how == "cut":
        del data[place:]
    elif how == "older":  # torn: the header of one block, a part of another one
        other = PAGE_BYTES + place % 4 * SLOT_BYTES
        data[start + PAGE_BYTES : start + SLOT_BYTES - 512] = data[other + PAGE_BYTES : other + SLOT_BYTES - 512]
    else:  # a header that is intact and has another block hash than its bytes
        header = encode_header(FINGERPRINT, hash_of(place % 9), None, place, memoryview(block_of(77)))
        data[start : start + PAGE_BYTES] = header


@settings(max_examples=60, deadline=None)
@given(st.lists(DAMAGE, min_size=1, max_size=6))
@pytest.mark.full
def test_after_any_damage_each_block_is_right_or_a_miss(damages: list[Damage]) -> None:
    async def run() -> None:
        with TemporaryDirectory() as name:
            folder = Path(name)
            await filled(folder, 1, 2, 3, 4)
            data = bytearray((folder / FILE).read_bytes())
            for each in damages:
                damage(data, *each)
            (folder / FILE).write_bytes(data)
            await restarted(folder, 4, range(9))

    asyncio.run(run())


# Writes blocks 0, 1, 2, ... and prints each that is stored. Write number argv[2] stops after argv[3] bytes and says so.
WRITER = """
import asyncio, sys, time
from pathlib import Path
from tests.kv_store.slabs import Opened, block_of, hash_of

async def main(folder, stop_at, part):
    opened = Opened(Path(folder), 8)
    writes = 0
    def write(buffer, offset):
        nonlocal writes
        writes += 1
        if writes < stop_at:
            return opened.slab.really_write(buffer, offset)
        opened.slab.really_write(buffer[:part], offset)
        print("torn", flush=True)
        time.sleep(600)
    opened.slab.on_write = write
    for number in range(100):
        assert await opened.store.write(hash_of(number), memoryview(block_of(number)))
        print(number, flush=True)
        if stop_at > 1000:
            await asyncio.sleep(0.001)
    time.sleep(600)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def writer(folder: Path, stop_at: int, part: int) -> "subprocess.Popen[str]":
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
    command = [sys.executable, "-c", WRITER, str(folder), str(stop_at), str(part)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths)


@pytest.mark.parametrize("part", [PAGE_BYTES, 2 * PAGE_BYTES])
async def test_kill_9_in_the_middle_of_a_write_loses_that_block_alone(tmp_path: Path, part: int) -> None:
    child = writer(tmp_path, stop_at=11, part=part)
    assert child.stdout is not None
    try:
        stored = []
        while (line := (await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), WAIT_S)).strip()) != "torn":
            stored.append(int(line))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert stored == list(range(10))
    assert await restarted(tmp_path, 8, range(12)) == {3, 4, 5, 6, 7, 8, 9}, "0 and 1 were evicted, 2 gave way to 10"


async def test_kill_9_at_any_time_keeps_what_was_stored(tmp_path: Path) -> None:
    child = writer(tmp_path, stop_at=1 << 20, part=0)
    assert child.stdout is not None
    try:
        stored = [int(await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), WAIT_S)) for _ in range(37)]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    found = await restarted(tmp_path, 8, range(100))
    assert len(found) >= 7 and min(found) > stored[-1] - 8


async def test_the_slab_of_a_live_worker_is_taken_only_after_its_death(tmp_path: Path) -> None:
    child = writer(tmp_path, stop_at=3, part=0)
    assert child.stdout is not None
    size = store_bytes(8, BLOCK_BYTES)
    try:
        while (await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), WAIT_S)).strip() != "torn":
            pass
        store = open_kv_store(tmp_path, size, BLOCK_BYTES, FINGERPRINT)
        assert store.path.name == SLAB_FILES[1] and not store.block_hashes
        assert store.match([hash_of(0), hash_of(1), hash_of(2)]) == 2, "the third one is being written"
        await store.close()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    store = open_kv_store(tmp_path, size, BLOCK_BYTES, FINGERPRINT)
    assert store.path.name == SLAB_FILES[0] and store.block_hashes == (hash_of(0), hash_of(1))
    await store.close()
