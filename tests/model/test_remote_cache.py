"""A real (small, random) model whose prefixes go to a real server and come back on other workers: no token changes."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.open import SharedMemory
from tests.frontend.http.certificates import Authority
from tests.kv_store.redis_server import RedisServer
from tests.kv_store.tls_endpoint import tls_endpoint
from tests.model.test_disk_cache import BLOCK_BYTES, WAIT_S, Client, config
from workers.config import ByteSize, CacheConfig, RemoteCacheConfig, WorkerConfig
from workers.engine.kv_event_log import Tier
from workers.errors import KVStoreError
from workers.executor.rank_loader import open_solo
from workers.executor.rank_store import RemoteCache
from workers.kv_store import remote_store
from workers.model.folder import ModelFolder
from workers.worker import Worker


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    subject = RedisServer(tmp_path)
    subject.start()
    yield subject
    subject.kill()


def remote(server: RedisServer, name: str = "w", **engine: object) -> WorkerConfig:
    made = config(None, **engine)
    cache = CacheConfig(ByteSize(10 * BLOCK_BYTES), remote=RemoteCacheConfig(server.url))
    return replace(made, name=name, cache=cache)


Done = tuple[list[list[int]], int, RemoteCache | None]


async def answers(
    tiny: ModelFolder, made: WorkerConfig, numbers: range, before: Callable[[int], object] = lambda number: None
) -> Done:
    """Ask one worker, then close it: tokens, cached tokens, and its remote tier. `before` each question."""
    executor = await open_solo(made, tiny, f"{made.name}-1", SharedMemory())
    worker = await Worker.open(made, f"{made.name}-1", executor, heartbeat_s=0.25)
    client = Client(worker)
    listening = asyncio.ensure_future(worker.subscribe("t", client.take))
    await asyncio.sleep(0)
    tokens, cached = [], 0
    for number in numbers:
        before(number)
        found, not_computed = await client.ask(number)
        tokens.append(found)
        cached += not_computed
    tier = executor.caches.get(Tier.REMOTE)
    assert tier is None or isinstance(tier, RemoteCache)
    if tier is not None:
        async with asyncio.timeout(WAIT_S):
            while tier._tasks:  # writes that are still in progress
                await asyncio.sleep(0.001)
        assert worker.engine.pool.log.hashes(Tier.REMOTE) <= {*worker.engine._stores[0]._prefixes.values()}
    listening.cancel()
    await worker.close()
    return tokens, cached, tier


@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("fp8", marks=pytest.mark.full)])
async def test_prefixes_of_another_worker_give_the_tokens_of_computed_ones(
    tiny: ModelFolder, server: RedisServer, dtype: str
) -> None:
    expected, _, _ = await answers(tiny, config(None, prefix_caching=False, dtype=dtype), range(15))
    found, _, tier = await answers(tiny, remote(server, dtype=dtype), range(10))
    assert found == expected[:10] and tier is not None
    assert tier.stats().written_bytes > 10 * tier.stats().block_bytes and not tier.stats().failures
    found, cached, tier = await answers(tiny, remote(server, "other", dtype=dtype), range(10, 15))
    assert found == expected[10:] and tier is not None
    read_blocks = tier.stats().read_bytes // tier.stats().block_bytes
    # Each prompt comes once, so all of this is from the other worker. Computing may pass a read in flight (0070).
    assert cached >= 8 and read_blocks > 5


@pytest.mark.parametrize(("one", "other"), [({}, {"weights": "int8"}), ({"dtype": "int8"}, {"dtype": "fp8"})])
async def test_other_weights_and_other_numbers_of_the_same_size_find_nothing(
    tiny: ModelFolder, server: RedisServer, one: dict[str, str], other: dict[str, str]
) -> None:
    await answers(tiny, remote(server, **one), range(10))
    _, _, tier = await answers(tiny, remote(server, **other), range(3))
    assert tier is not None and tier.stats().read_bytes == 0


@pytest.mark.parametrize("way", ["kill", "stop"])
async def test_a_server_that_dies_or_hangs_between_prompts_changes_no_token(
    tiny: ModelFolder, server: RedisServer, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "REPLY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(remote_store, "UPLOAD_TIMEOUT_S", 0.5)
    expected, _, _ = await answers(tiny, config(None, prefix_caching=False), range(10))
    await answers(tiny, remote(server), range(5))
    with ExitStack() as hanging:

        def fail(number: int) -> None:
            if number == 2 and way == "kill":
                server.kill()
            elif number == 2:
                hanging.enter_context(server.stopped())

        found, _, tier = await answers(tiny, remote(server, "other"), range(10), fail)
    assert found == expected and tier is not None
    assert tier.stats().failures + tier.stats().late > 0


async def test_a_worker_starts_without_its_server_and_says_so(tiny: ModelFolder, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)  # not started
    expected, _, _ = await answers(tiny, config(None, prefix_caching=False), range(3))
    found, _, tier = await answers(tiny, remote(server), range(3))
    assert found == expected and tier is not None
    assert "reads stopped: " in tier.stats().trouble and "writes stopped: " in tier.stats().trouble


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def over_tls(made: WorkerConfig, port: int, ca: Path, password_file: str = "") -> WorkerConfig:
    behind = RemoteCacheConfig(f"rediss://127.0.0.1:{port}/0", password_file, ca_file=str(ca))
    return replace(made, cache=replace(made.cache, remote=behind))


async def test_prefixes_come_back_over_tls_with_a_password(
    tiny: ModelFolder, tmp_path: Path, authority: Authority
) -> None:
    server, password = RedisServer(tmp_path, "--requirepass", "right"), tmp_path / "password"
    password.write_text("right\n")
    server.start()
    try:
        with tls_endpoint(server.port, authority.sign("server")) as port:
            made = over_tls(remote(server), port, authority.ca, str(password))
            expected, _, tier = await answers(tiny, made, range(10))
            assert tier is not None and tier.stats().written_bytes > 10 * tier.stats().block_bytes
            found, cached, tier = await answers(tiny, replace(made, name="other"), range(10))
            assert found == expected and cached > 0 and tier is not None and tier.stats().read_bytes > 0
            assert not tier.stats().failures and not tier.stats().trouble
            password.write_text("wrong")
            found, cached, tier = await answers(tiny, made, range(3))
            assert (found, cached) == (expected[:3], 0) and tier is not None
            assert "reads stopped: " in tier.stats().trouble and "password" in tier.stats().trouble
    finally:
        server.kill()


TLS_MISTAKES = {
    "another authority": "unable to get local issuer certificate",
    "expired": "certificate has expired",
    "another name": "IP address mismatch",
    "a server without TLS": "the server answers without TLS: write redis://",
    "a client without TLS": "Connection closed by server|reset by peer",
}


@pytest.mark.parametrize("mistake", TLS_MISTAKES)
async def test_what_is_wrong_with_tls_stops_the_tier_with_its_reason_and_changes_no_token(
    tiny: ModelFolder,
    server: RedisServer,
    tmp_path: Path,
    authority: Authority,
    mistake: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = Authority(tmp_path, "other")
    expected, _, _ = await answers(tiny, config(None, prefix_caching=False), range(5))
    await answers(tiny, remote(server), range(5))  # it has all blocks
    pair = authority.sign("server", hours=-0.1 if mistake == "expired" else 1.0)
    if mistake == "another name":
        pair = authority.sign("server", "127.0.0.2")
    caplog.clear()
    with tls_endpoint(server.port, pair) as port:
        ca = other.ca if mistake == "another authority" else authority.ca
        made = over_tls(remote(server, "other"), server.port if mistake == "a server without TLS" else port, ca)
        if mistake == "a client without TLS":
            made = replace(made, cache=replace(made.cache, remote=RemoteCacheConfig(f"redis://127.0.0.1:{port}/0")))
        found, cached, tier = await answers(tiny, made, range(5))
    assert found == expected and cached == 0 and tier is not None and tier.stats().read_bytes == 0
    assert re.search(f"reads stopped: .*({TLS_MISTAKES[mistake]})", tier.stats().trouble), tier.stats().trouble
    lines = [each.getMessage() for each in caplog.records if "reads of the remote KV store" in each.getMessage()]
    assert len(lines) == 1 and "are stopped" in lines[0], lines


def test_a_server_without_tls_is_told_apart_before_a_handshake_waits_for_it(
    server: RedisServer, tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_measure", None)  # no handshake is tried
    url = server.url.replace("redis://", "rediss://")
    store = remote_store.open_remote_store(url, None, str(authority.ca), b"f", 4096)
    assert store._problem == "the server answers without TLS: write redis:// for it"
    with tls_endpoint(server.port, authority.sign("server")) as port:
        assert not remote_store._answers_without_tls(f"rediss://127.0.0.1:{port}/0")


async def test_a_missing_file_or_library_is_one_error_at_the_start(
    tiny: ModelFolder, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = remote(server)
    missing = replace(made, cache=replace(made.cache, remote=RemoteCacheConfig(server.url, password_file="/missing")))
    with pytest.raises(KVStoreError, match=r"password_file.*/missing"):
        await open_solo(missing, tiny, "w-1", SharedMemory())
    (no_certificate := tmp_path / "key.pem").write_text("none")
    for ca, problem in ((tmp_path / "missing", "No such file"), (no_certificate, "NO_CERTIFICATE")):
        with pytest.raises(KVStoreError, match=f"cache.remote.ca_file {ca}: .*{problem}"):
            await open_solo(over_tls(made, server.port, ca), tiny, "w-1", SharedMemory())
    monkeypatch.setitem(__import__("sys").modules, "workers.kv_store.remote_store", None)
    with pytest.raises(KVStoreError, match=r"pip install 'diptych\[remote\]'"):
        await open_solo(made, tiny, "w-1", SharedMemory())
