"""A gang's disk: each rank has its part of a block, and what one of them misses is a miss for all. No token changes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.open import SharedMemory
from tests.model.test_disk_cache import WAIT_S, Client, config
from tests.model.tiny import write_tiny_llama
from workers.config import ByteSize, CacheConfig, ParallelConfig, RemoteCacheConfig
from workers.engine.kv_event_log import Tier
from workers.errors import RankLost
from workers.executor.gang import open_gang
from workers.executor.gang_store import GangStore
from workers.executor.rank_server import RankTasks
from workers.executor.rank_store import DiskCache
from workers.executor.remote_rank import RemoteRank
from workers.kv_store.slab import SLAB_FILES
from workers.kv_store.verify import verify_slab
from workers.model.folder import ModelFolder
from workers.stats import TierStats
from workers.worker import Worker

PROMPTS = [tuple(3 + (7 * position + 31 * number) % 200 for position in range(60)) for number in range(8)]


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("gang") / "model"
    return ModelFolder(str(path), write_tiny_llama(path, num_layers=3, hidden_size=72, num_heads=9, num_kv_heads=3))


async def answers(
    model: ModelFolder, folder: Path | None, parallel: ParallelConfig, numbers: Sequence[int], url: str = ""
) -> tuple[list[list[int]], int, TierStats | None]:
    """Ask one worker, then close it. Returns tokens, how many of the prompts were not computed, and the store's part.

    The store is a disk in `folder`, or a server.
    """
    made = replace(config(folder, kv_blocks=24), parallel=parallel)
    if made.cache.disk is not None:
        disk = replace(made.cache.disk, size=ByteSize(6 << 20))
        made = replace(made, cache=CacheConfig(ByteSize(1 << 20), disk))
    if url:
        made = replace(made, cache=CacheConfig(ByteSize(1 << 20), remote=RemoteCacheConfig(url)))
    shared = SharedMemory()
    executor = await open_gang(made, model, "w-1", RankTasks(lambda _: model, shared), shared)
    worker = await Worker.open(made, "w-1", executor, heartbeat_s=0.25)
    client = Client(worker)
    listening = asyncio.ensure_future(worker.subscribe("t", client.take))
    await asyncio.sleep(0)
    found = [await client.answer(number, PROMPTS[number]) for number in numbers]
    async with asyncio.timeout(WAIT_S):
        while any(store._asking for store in executor._stores):
            await asyncio.sleep(0.001)
    tiers = [tier for tier in worker.engine.stats().tiers if tier.name in ("disk", "remote")]
    listening.cancel()
    await worker.close()
    return [tokens for tokens, _ in found], sum(cached for _, cached in found), tiers[0] if tiers else None


def size_of(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir())


def stored(folder: Path) -> list[int]:
    """Good blocks in the slab of each rank."""
    slabs = [folder / name for name in SLAB_FILES if (folder / name).exists()]
    return [verify_slab(slab, lambda *_: None).good for slab in slabs]


@pytest.mark.parametrize("parallel", [ParallelConfig(3, 1), ParallelConfig(1, 2)])
async def test_a_gang_finds_its_blocks_on_the_disk_after_a_restart(
    nine_heads: ModelFolder, tmp_path: Path, parallel: ParallelConfig
) -> None:
    expected, _, _ = await answers(nine_heads, None, parallel, range(8))
    found, _, disk = await answers(nine_heads, tmp_path, parallel, range(8))
    assert found == expected and disk is not None and disk.blocks > 10
    assert stored(tmp_path) == [disk.blocks] * parallel.world_size, "each rank has its part of each block"
    assert size_of(tmp_path) <= 6 << 20
    found, cached, disk = await answers(nine_heads, tmp_path, parallel, range(3))
    assert found == expected[:3] and disk is not None
    assert cached > 0 and disk.hit_tokens == cached, "a new worker has nothing else"
    assert disk.read_bytes >= cached // 8 * disk.block_bytes


async def test_what_one_rank_has_lost_is_a_miss_for_all_and_stored_again(
    nine_heads: ModelFolder, tmp_path: Path
) -> None:
    parallel = ParallelConfig(3, 1)
    expected, _, _ = await answers(nine_heads, tmp_path, parallel, range(8))
    before = stored(tmp_path)
    (tmp_path / SLAB_FILES[1]).unlink()
    found, cached, disk = await answers(nine_heads, tmp_path, parallel, range(8))
    assert found == expected and cached == 0 and disk is not None and disk.hit_tokens == 0
    # A rank without a slab may take that of one that has not started, and one whose queue of writes is full drops what
    # comes: it is stored when it comes again.
    for _ in range(5):
        if stored(tmp_path) == before:
            break
        await answers(nine_heads, tmp_path, parallel, range(8))
    assert stored(tmp_path) == before
    found, cached, _ = await answers(nine_heads, tmp_path, parallel, range(3))
    assert found == expected[:3] and cached > 0


async def test_a_lost_rank_ends_a_read_and_what_is_forgotten_is_gone_on_all_ranks(
    nine_heads: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = ParallelConfig(1, 2)
    await answers(nine_heads, tmp_path, parallel, range(8))
    made = replace(config(tmp_path, kv_blocks=24), parallel=parallel)
    assert made.cache.disk is not None
    made = replace(made, cache=CacheConfig(ByteSize(1 << 20), replace(made.cache.disk, size=ByteSize(6 << 20))))
    shared = SharedMemory()
    executor = await open_gang(made, nine_heads, "w-1", RankTasks(lambda _: nine_heads, shared), shared)
    (disk,) = executor.stores(lambda: None)
    disk.watch(lambda block_hash, prefix: None, lambda block_hash: None)
    assert isinstance(disk, GangStore) and isinstance(disk._own, DiskCache)
    first, second = disk._own.store.block_hashes[:2]

    async def arrives(block_hash: bytes) -> bool:
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        disk.read(block_hash, 0, WAIT_S, lambda arrived, _: told.set_result(arrived))
        return await asyncio.wait_for(told, WAIT_S)

    def lost(self: RemoteRank, tier: Tier, block_hash: bytes, block: int, timeout_s: float) -> "asyncio.Future[bool]":
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(reply.set_exception, RankLost("gone"))
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRank, "read_block", lost)
        assert not await arrives(first)
    assert await arrives(first)
    disk.forget([first])
    assert not await arrives(first) and await arrives(second)
    (other,) = executor._others
    assert [await other.read_block(Tier.DISK, block_hash, 0, WAIT_S) for block_hash in (first, second)] == [False, True]
    await executor.close()
