"""A gang whose ranks keep their parts of blocks on a real server: found again by another gang, and no token changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.kv_store.redis_server import RedisServer
from tests.model.test_gang_disk import answers
from tests.model.test_gang_disk import nine_heads as nine_heads
from workers.config import ParallelConfig
from workers.model.folder import ModelFolder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    subject = RedisServer(tmp_path)
    subject.start()
    yield subject
    subject.kill()


def keys_of(server: RedisServer) -> dict[str, list[bytes]]:
    """The keys of blocks, by fingerprint: one for each rank."""
    found: dict[str, list[bytes]] = {}
    with Redis(port=server.port) as client:
        for key in client.scan_iter("diptych:*"):
            _, fingerprint, name = key.decode().split(":")
            if name != "probe":
                found.setdefault(fingerprint, []).append(key)
    return found


@pytest.mark.parametrize("parallel", [ParallelConfig(3, 1), ParallelConfig(1, 2)])
async def test_a_gang_finds_its_blocks_on_the_server_after_a_restart(
    nine_heads: ModelFolder, server: RedisServer, parallel: ParallelConfig
) -> None:
    expected, _, _ = await answers(nine_heads, None, parallel, range(8))
    found, _, remote = await answers(nine_heads, None, parallel, range(8), server.url)
    assert found == expected and remote is not None and remote.blocks > 10 and not remote.failures
    counts = [len(keys) for keys in keys_of(server).values()]
    assert counts == [remote.blocks] * parallel.world_size, "each rank has its part of each block"
    found, cached, remote = await answers(nine_heads, None, parallel, range(3), server.url)
    assert found == expected[:3] and remote is not None
    assert cached > 0 and remote.hit_tokens == cached, "a new worker has nothing else"
    assert remote.read_bytes >= cached // 8 * remote.block_bytes


async def test_gangs_of_other_shapes_do_not_take_each_others_parts(
    nine_heads: ModelFolder, server: RedisServer
) -> None:
    expected, _, _ = await answers(nine_heads, None, ParallelConfig(3, 1), range(3), server.url)
    found, cached, _ = await answers(nine_heads, None, ParallelConfig(1, 2), range(3), server.url)
    assert (found, cached) == (expected, 0) and len(keys_of(server)) == 5


async def test_what_the_server_has_lost_of_one_rank_is_a_miss_for_all_and_stored_again(
    nine_heads: ModelFolder, server: RedisServer
) -> None:
    parallel = ParallelConfig(3, 1)
    expected, _, _ = await answers(nine_heads, None, parallel, range(8), server.url)
    before = keys_of(server)
    for lost in before.values():  # of any rank, also the leader
        with Redis(port=server.port) as client:
            client.delete(*lost)
        found, cached, remote = await answers(nine_heads, None, parallel, range(8), server.url)
        assert found == expected and cached == 0 and remote is not None and remote.hit_tokens == 0
        assert {len(keys) for keys in keys_of(server).values()} == {len(lost)}
    found, cached, _ = await answers(nine_heads, None, parallel, range(3), server.url)
    assert found == expected[:3] and cached > 0


async def test_a_server_that_is_gone_costs_a_gang_no_request(nine_heads: ModelFolder, server: RedisServer) -> None:
    parallel = ParallelConfig(1, 2)
    expected, _, _ = await answers(nine_heads, None, parallel, range(3))
    server.kill()
    found, cached, remote = await answers(nine_heads, None, parallel, range(3), server.url)
    assert (found, cached) == (expected, 0) and remote is not None and "reads stopped" in remote.problem
