"""The remote store against a real server that dies, hangs, is full, and has other bytes under a block hash."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from redis import Redis

from tests.kv_store.redis_server import RedisServer
from workers.errors import KVStoreError
from workers.kv_store import health, remote_store
from workers.kv_store.health import MAX_FAILURES
from workers.kv_store.io_threads import READ_THREADS, WRITE_THREADS
from workers.kv_store.known_blocks import KnownBlocks
from workers.kv_store.remote_store import RemoteStore, open_remote_store
from workers.kv_store.slot_format import PAGE_BYTES, encode_header

BLOCK_BYTES = 5000
OURS, THEIRS = b"o" * 32, b"t" * 32
HASHES = [bytes([number]) * 16 for number in range(20)]
BLOCKS = [memoryview(os.urandom(BLOCK_BYTES)) for _ in HASHES]
WAIT_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    subject = RedisServer(tmp_path)
    subject.start()
    yield subject
    subject.kill()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hanging servers are noticed, and tried again, sooner."""
    monkeypatch.setattr(remote_store, "REPLY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(health, "PROBE_PAUSE_S", 0.2)


def opened(server: RedisServer, fingerprint: bytes = OURS, password: str | None = None) -> RemoteStore:
    store = open_remote_store(server.url, password, None, fingerprint, BLOCK_BYTES)
    store.watch(lambda *_: None, lambda _: None)
    return store


async def read(store: RemoteStore, number: int, timeout_s: float = WAIT_S) -> bytes | None:
    """None: a miss, which left the target as it was."""
    target = bytearray(b"x" * BLOCK_BYTES)
    arrived = await store.read(HASHES[number], memoryview(target), timeout_s)
    assert arrived or target == b"x" * BLOCK_BYTES
    return bytes(target) if arrived else None


async def until(condition: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


async def test_what_one_store_has_written_is_read_by_another(server: RedisServer) -> None:
    one, other = opened(server), opened(server)
    for number in range(5):
        assert await one.write(HASHES[number], BLOCKS[number], prefix=100 + number)
    added: dict[bytes, int] = {}
    other.added = added.__setitem__
    assert await other.find(HASHES[:10], WAIT_S) == 5 and await other.find(HASHES[7:], WAIT_S) == 0
    assert await other.find([], WAIT_S) == 0
    assert [await read(other, number) for number in range(6)] == [*BLOCKS[:5], None]
    assert added == {HASHES[number]: 100 + number for number in range(5)}
    assert await other.write(HASHES[3], BLOCKS[3]) and await one.write(HASHES[3], BLOCKS[3])
    assert one.stats().writes == 5 and other.stats().writes == 0 and other.stats().reads == 5
    assert one.stats().read_failures == other.stats().read_failures == 0 and one.read_byte_s > 0
    await one.close()
    await other.close()


async def test_a_store_of_another_fingerprint_finds_nothing(server: RedisServer) -> None:
    one, other = opened(server), opened(server, THEIRS)
    assert await one.write(HASHES[0], BLOCKS[0])
    assert await other.find(HASHES[:1], WAIT_S) == 0 and await read(other, 0) is None
    await one.close()
    await other.close()


async def test_other_bytes_under_a_name_are_a_miss_and_are_written_again(server: RedisServer) -> None:
    store, client = opened(server), Redis(port=server.port)
    keys = [f"diptych:{OURS.hex()}:{block_hash.hex()}" for block_hash in HASHES]
    good = encode_header(OURS, HASHES[0], None, 0, BLOCKS[0]) + bytes(BLOCKS[0])
    lies = {
        0: bytes([good[0] ^ 1]) + good[1:],
        1: good,  # intact, of another block
        2: encode_header(THEIRS, HASHES[2], None, 0, BLOCKS[2]) + bytes(BLOCKS[2]),
        3: encode_header(OURS, HASHES[3], None, 0, BLOCKS[3]) + bytes(BLOCKS[4]),
        4: encode_header(OURS, HASHES[4], None, 0, BLOCKS[4])[:-1] + b"\0" + bytes(BLOCKS[4][:-1]) + b"?",
    }
    for number, lie in lies.items():
        client.set(keys[number], lie)
    client.set(keys[5], good[:-1])  # torn
    client.set(keys[6], good + b"0")
    client.rpush(keys[7], "a list")
    assert await store.find(HASHES[:8], WAIT_S) == 5, "values of the right size"
    assert [await read(store, number) for number in range(8)] == [None] * 8
    assert store.stats().corrupt == 7 and store.stats().read_failures == 1, "a list cannot be read"
    for number in range(7):
        assert await store.write(HASHES[number], BLOCKS[number])
        assert await read(store, number) == BLOCKS[number]
    assert not client.exists(keys[8]) and not store.stats().stopped_reads
    client.close()
    await store.close()


async def test_a_block_in_doubt_is_read_only_after_it_was_written_again(server: RedisServer) -> None:
    one, other = opened(server), opened(server)
    gone: list[bytes] = []
    one.known.gone = gone.append
    await one.write(HASHES[0], BLOCKS[0])
    one.forget(HASHES[:1])
    assert gone == HASHES[:1] and await one.find(HASHES[:1], WAIT_S) == 0 and await read(one, 0) is None
    await until(lambda: not Redis(port=server.port).keys("*" + HASHES[0].hex()))
    assert await read(other, 0) is None
    assert await one.write(HASHES[0], BLOCKS[1]) and await read(one, 0) == BLOCKS[1] == await read(other, 0)
    await one.close()
    await other.close()


async def test_a_killed_server_is_a_miss_and_is_used_again_when_it_is_back(server: RedisServer) -> None:
    store, gone = opened(server), list[bytes]()
    store.known.gone = gone.append
    assert await store.write(HASHES[0], BLOCKS[0])
    server.kill()
    for _ in range(MAX_FAILURES):
        assert await read(store, 0) is None and not await store.write(HASHES[1], BLOCKS[1])
    stats = store.stats()
    assert stats.stopped_reads and stats.stopped_writes and gone == HASHES[:1]
    assert stats.read_failures == stats.write_failures == MAX_FAILURES
    assert await store.find(HASHES, WAIT_S) == 0 and not await store.write(HASHES[1], BLOCKS[1])
    assert store.stats().writes_dropped == 1, "nobody waits for a server that is stopped"
    server.start()
    await until(lambda: not store.stats().stopped_reads and not store.stats().stopped_writes)
    assert await read(store, 0) is None, "the server has kept nothing"
    assert await store.write(HASHES[1], BLOCKS[1]) and await read(store, 1) == BLOCKS[1]
    await store.close()


async def test_a_server_that_hangs_is_late_and_is_used_again_when_it_goes_on(server: RedisServer) -> None:
    store = opened(server)
    await store.write(HASHES[0], BLOCKS[0])
    with server.stopped():
        assert await store.find(HASHES, 0.05) == 0
        assert [await read(store, 0, 0.05) for _ in range(MAX_FAILURES)] == [None] * MAX_FAILURES
        assert store.stats().late >= MAX_FAILURES and store.stats().stopped_reads
    await until(lambda: not store.stats().stopped_reads)
    assert await read(store, 0) == BLOCKS[0]
    with server.stopped():
        reading = asyncio.ensure_future(read(store, 0))
        await asyncio.sleep(0.05)
        await store.close()
        assert await reading is None, "a store that closes waits for nobody"


async def test_a_full_server_refuses_writes_and_still_answers_reads(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory-policy", "noeviction")
    server.start()
    try:
        store = opened(server)
        assert await store.write(HASHES[0], BLOCKS[0])
        client = Redis(port=server.port)
        client.config_set("maxmemory", 1)
        assert [await store.write(block_hash, BLOCKS[1]) for block_hash in HASHES[1 : 1 + MAX_FAILURES]] == [
            False
        ] * MAX_FAILURES
        assert "maxmemory" in store.stats().stopped_writes and not store.stats().stopped_reads
        assert await read(store, 0) == BLOCKS[0]
        client.config_set("maxmemory", 0)
        await until(lambda: not store.stats().stopped_writes)
        assert await store.write(HASHES[1], BLOCKS[1])
        await store.close()
    finally:
        server.kill()


async def test_evicted_blocks_are_reported_as_gone(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    server.start()
    try:
        store, gone = opened(server), list[bytes]()
        store.known.gone = gone.append
        await store.write(HASHES[0], BLOCKS[0])
        client = Redis(port=server.port)
        key, number = f"diptych:{OURS.hex()}:{HASHES[0].hex()}", 0
        while client.exists(key) and number < 20_000:  # the server samples what it evicts
            client.set(f"other {number}", bytes(10_000))
            number += 1
        assert await store.find(HASHES[:1], WAIT_S) == 0 and gone == HASHES[:1]
        await store.close()
    finally:
        server.kill()


async def test_a_wrong_password_is_a_problem_and_no_error(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--requirepass", "right")
    server.start()
    try:
        wrong, right = opened(server, password="wrong"), opened(server, password="right")
        assert wrong.stats().stopped_reads and wrong.stats().stopped_writes
        assert not await wrong.write(HASHES[0], BLOCKS[0]) and await wrong.find(HASHES, WAIT_S) == 0
        assert await right.write(HASHES[0], BLOCKS[0]) and await read(right, 0) == BLOCKS[0]
        await wrong.close()
        await right.close()
    finally:
        server.kill()


async def test_a_server_that_comes_after_the_worker_is_used(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    store = opened(server)
    assert "refused" in store.stats().stopped_reads
    server.start()
    try:
        await until(lambda: not store.stats().stopped_reads and not store.stats().stopped_writes)
        assert await store.write(HASHES[0], BLOCKS[0]) and await read(store, 0) == BLOCKS[0]
        await store.close()
    finally:
        server.kill()


async def test_known_names_are_bounded(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "KnownBlocks", partial(KnownBlocks, 3))
    store, gone = opened(server), list[bytes]()
    store.known.gone = gone.append
    for block_hash, block in zip(HASHES[:5], BLOCKS, strict=False):
        assert await store.write(block_hash, block)
    assert gone == HASHES[:2] and store.stats().num_stored == 3
    assert await store.find(HASHES[:5], WAIT_S) == 5, "they are there all the same"
    await store.close()


async def test_more_writes_than_may_wait_are_dropped(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "MAX_WRITES", 2)
    store = opened(server)
    with server.stopped():
        writing = [asyncio.ensure_future(store.write(*each)) for each in zip(HASHES, BLOCKS, strict=True)]
        await asyncio.sleep(0.05)
        assert store.stats().writes_dropped >= len(HASHES) - 2 * WRITE_THREADS - 2
    await asyncio.gather(*writing)
    await store.close()


def test_a_url_that_names_no_server_is_refused() -> None:
    with pytest.raises(KVStoreError, match="no URL of a server"):
        open_remote_store("http://there", None, None, OURS, PAGE_BYTES)


async def test_a_server_that_speaks_another_language_is_a_problem_and_no_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(b":one\r\n$two\r\nthree")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        url = f"redis://127.0.0.1:{other.sockets[0].getsockname()[1]}/0"
        store = await asyncio.to_thread(open_remote_store, url, None, None, OURS, BLOCK_BYTES)
        store.watch(lambda *_: None, lambda _: None)
        assert store.stats().stopped_reads and not await store.write(HASHES[0], BLOCKS[0])
        await store.close()


@pytest.mark.parametrize("reply", [b":5\r\n", b"$-1\r\n", b"*1\r\n$2\r\nno\r\n", b"*1\r\n" * 3000, b"+\r\n"])
async def test_replies_of_any_kind_are_misses_and_leave_the_threads_at_work(reply: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        url = f"redis://127.0.0.1:{other.sockets[0].getsockname()[1]}/0"
        store = await asyncio.to_thread(open_remote_store, url, None, None, OURS, BLOCK_BYTES)
        found = [await read(store, number) for number in range(2 * READ_THREADS)]
        assert found == [None] * len(found) and not await store.find(HASHES, WAIT_S)
        await store.write(HASHES[0], BLOCKS[0])
        stats = store.stats()
        assert (stats.reads, stats.late) == (0, 0), "each read was answered"
        await store.close()


async def test_an_endless_value_fails_once_it_is_longer_than_a_block() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read(1 << 16)
            writer.write(b"$1000000000000\r\n")
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as endless:
        url = f"redis://127.0.0.1:{endless.sockets[0].getsockname()[1]}/0"
        store = await asyncio.to_thread(open_remote_store, url, None, None, OURS, BLOCK_BYTES)
        store.watch(lambda *_: None, lambda _: None)
        assert "a reply of more than" in store.stats().stopped_reads
        await store.close()


async def test_what_is_written_while_reads_are_stopped_is_not_reported_as_readable(server: RedisServer) -> None:
    store, client = opened(server), Redis(port=server.port)
    client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-getrange", "-ping"])
    for _ in range(MAX_FAILURES):
        assert await read(store, 0) is None
    assert store.stats().stopped_reads and not store.stats().stopped_writes
    assert not await store.write(HASHES[0], BLOCKS[0]) and (store.stats().writes, store.stats().num_stored) == (1, 0)
    client.acl_setuser("default", commands=["+@all"])
    await until(lambda: not store.stats().stopped_reads)
    assert await store.write(HASHES[0], BLOCKS[0]) and (store.stats().writes, store.stats().num_stored) == (1, 1)
    assert await read(store, 0) == BLOCKS[0]
    client.close()
    await store.close()
