"""A real (small, random) model whose prefixes went to a disk and came back, also after a restart: no token changes."""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from kvtransfer.open import SharedMemory
from tests.engine.waiting import wait_for_fetches
from tests.kv_store.slabs import FILE
from tests.model.test_host_tier import PROMPTS
from workers.config import ByteSize, CacheConfig, DiskCacheConfig, EngineConfig, TransferConfig, WorkerConfig
from workers.costs import LinearCost
from workers.engine.estimate import StepEstimate
from workers.engine.kv_event_log import Tier
from workers.engine.read_speed import ReadSpeed
from workers.engine.step import StepPlan, StepResult
from workers.errors import KVStoreError
from workers.executor.rank import Rank
from workers.executor.rank_loader import open_solo
from workers.executor.rank_store import DiskCache
from workers.kv_events import prefix_hashes
from workers.kv_store.health import MAX_FAILURES
from workers.kv_store.slab import Slab
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.kv_layers import kv_layout
from workers.request import EngineOutputs, Request, SamplingParams, TokensOut
from workers.worker import Worker

WAIT_S = 60.0
BLOCK_BYTES = 2048  # eight tokens of the tiny model


@pytest.fixture(autouse=True)
def steps_seem_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate does not learn how fast steps are, so that prompts wait for the disk."""
    monkeypatch.setattr(StepEstimate, "learn", lambda *_: None)


def config(folder: Path | None, **engine: object) -> WorkerConfig:
    """Fourteen blocks of eight tokens on the device, ten in host memory."""
    disk = DiskCacheConfig(str(folder), ByteSize(1 << 20)) if folder else None
    sizes = {"block_size": 8, "kv_blocks": 14, "max_batch_tokens": 32, "threads": 1}
    return WorkerConfig(
        "w",
        "pool",
        "tiny",
        EngineConfig(**{**sizes, **engine}),  # type: ignore[arg-type]
        cache=CacheConfig(ByteSize(10 * BLOCK_BYTES if disk else 0), disk),
        transfer=TransferConfig(backends=("memory",), host="127.0.0.1"),
        secret="test",
        cost=LinearCost(prefill_token_s=1.0, swap_byte_s=0.0),
    )


def disk_of(executor: Rank) -> DiskCache | None:
    found = executor.caches.get(Tier.DISK)
    assert found is None or isinstance(found, DiskCache)
    return found


async def written(executor: Rank) -> None:
    """Wait for the writes that are in progress."""
    disk = disk_of(executor)
    async with asyncio.timeout(WAIT_S):
        while disk is not None and disk.store._copies:
            await asyncio.sleep(0.001)


@dataclass
class Client:
    """One worker, and its answers one after the other."""

    worker: Worker
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, message: EngineOutputs) -> None:
        for each in message.outputs:
            assert isinstance(each, TokensOut), each
            self.tokens += each.tokens
            self.cached_tokens = max(self.cached_tokens, each.cached_tokens)
            if each.finish is not None:
                self.ended.set()

    async def ask(self, number: int) -> tuple[list[int], int]:
        """Tokens, and how many tokens of the prompt were not computed."""
        return await self.answer(number, PROMPTS[number % len(PROMPTS)])

    async def answer(self, number: int, prompt: tuple[int, ...]) -> tuple[list[int], int]:
        """As `ask`."""
        self.tokens, self.cached_tokens, self.ended = [], 0, asyncio.Event()
        sampling = SamplingParams(temperature=float(number % 2), seed=number, max_tokens=6, ignore_eos=True)
        await self.worker.generate(Request(f"r{number}", prompt, sampling, reply_to="t"))
        await asyncio.wait_for(self.ended.wait(), WAIT_S)
        await self.worker.check()
        return self.tokens, self.cached_tokens


async def answers(
    tiny: ModelFolder, made: WorkerConfig, numbers: range
) -> tuple[list[list[int]], int, DiskCache | None]:
    """Ask one worker, then close it."""
    executor = await open_solo(made, tiny, "w-1", SharedMemory())
    worker = await Worker.open(made, "w-1", executor, heartbeat_s=0.25)
    client = Client(worker)
    listening = asyncio.ensure_future(worker.subscribe("t", client.take))
    await asyncio.sleep(0)
    tokens, cached = [], 0
    for number in numbers:
        found, not_computed = await client.ask(number)
        tokens.append(found)
        cached += not_computed
    disk = disk_of(executor)
    await written(executor)
    listening.cancel()
    await worker.close()
    return tokens, cached, disk


@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("fp8", marks=pytest.mark.full)])
async def test_prefixes_from_the_disk_give_the_tokens_of_computed_ones(
    small: ModelFolder, tmp_path: Path, dtype: str
) -> None:
    block_bytes = max(BLOCK_BYTES, kv_layout(read_model_config(small.path), "", 8, dtype).block_bytes)
    made = config(tmp_path, dtype=dtype)
    made = replace(made, cache=CacheConfig(ByteSize(10 * block_bytes), made.cache.disk))
    first, again = range(10), range(10, 15)
    plain = config(None, prefix_caching=False, dtype=dtype)
    expected, _, _ = await answers(small, plain, range(15))
    found, _, disk = await answers(small, made, first)
    assert found == expected[:10]
    assert disk is not None and disk.store.stats().writes > 10
    found, cached, disk = await answers(small, made, again)
    assert found == expected[10:]
    assert disk is not None and disk.store.stats().recovered > 10 and disk.store.stats().reads > 5
    assert cached > 0, "each prompt comes once, so all of this is from before the restart"


async def test_a_damaged_disk_changes_no_token(tiny: ModelFolder, tmp_path: Path) -> None:
    expected, _, _ = await answers(tiny, config(tmp_path), range(10))
    file = tmp_path / FILE
    data = bytearray(file.read_bytes())
    data[4096 + 4096 :: 4096] = bytes(len(data[4096 + 4096 :: 4096]))  # the first byte of most pages
    file.write_bytes(data)
    found, _, disk = await answers(tiny, config(tmp_path), range(10))
    assert found == expected and disk is not None
    assert disk.store.stats().reads + disk.store.stats().corrupt > 0


async def test_a_disk_whose_writes_fail_changes_no_token_and_is_in_the_statistics(
    tiny: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    expected, _, _ = await answers(tiny, config(None), range(10))
    monkeypatch.setattr(Slab, "write", fail)
    found, _, disk = await answers(tiny, config(tmp_path), range(10))
    assert found == expected and disk is not None
    tier = disk.stats()
    assert tier.trouble == "writes stopped: [Errno 5] Input/output error" and tier.failures >= MAX_FAILURES
    assert (tier.blocks, tier.written_bytes) == (0, 0) and tier.dropped_blocks > 0


@pytest.mark.parametrize(("one", "other"), [({}, {"weights": "int8"}), ({"dtype": "int8"}, {"dtype": "fp8"})])
async def test_other_weights_and_other_numbers_of_the_same_size_find_nothing(
    tiny: ModelFolder, tmp_path: Path, one: dict[str, str], other: dict[str, str]
) -> None:
    await answers(tiny, config(tmp_path, **one), range(10))
    _, _, disk = await answers(tiny, config(tmp_path, **other), range(1))
    assert disk is not None and disk.store.stats().recovered == 0


async def test_a_worker_without_its_folder_does_not_start_and_says_why(tiny: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(KVStoreError, match=r"missing is no folder; create it"):
        await open_solo(config(tmp_path / "missing"), tiny, "w-1", SharedMemory())


async def test_the_kv_event_log_has_what_is_on_the_disk_also_after_a_restart(tiny: ModelFolder, tmp_path: Path) -> None:
    """Prompts of 150 tokens have one prefix hash each: of their first 128."""
    made = config(tmp_path, kv_blocks=42)
    made = replace(made, cache=CacheConfig(ByteSize(64 * BLOCK_BYTES), made.cache.disk))
    prompts = [tuple(3 + (7 * position + 31 * number) % 200 for position in range(150)) for number in range(5)]
    logged: list[frozenset[int]] = []
    for asked in (prompts, []):
        executor = await open_solo(made, tiny, "w-1", SharedMemory())
        worker = await Worker.open(made, "w-1", executor, heartbeat_s=0.25)
        client = Client(worker)
        listening = asyncio.ensure_future(worker.subscribe("t", client.take))
        await asyncio.sleep(0)
        log = worker.engine.pool.log
        assert log.hashes(Tier.DISK) == (logged[-1] if logged else frozenset())
        assert (await worker.info()).disk_byte_s > 0.0
        for number, prompt in enumerate(asked):
            await client.answer(number, prompt)
        await written(executor)
        await asyncio.sleep(0)  # the writes that have ended are told
        logged.append(log.hashes(Tier.DISK))
        listening.cancel()
        await worker.close()
    assert logged[0] and logged[0] <= {prefix_hash for prompt in prompts for prefix_hash in prefix_hashes(prompt)}


async def test_a_worker_reads_what_another_has_stored_and_its_log_has_it(
    tiny: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one runs at first, and has ended later. Each prompt has one prefix hash: of its first 128 tokens.

    Whatever is on the disk is read, however slow that is.
    """
    wait_for_fetches(monkeypatch)
    monkeypatch.setattr("workers.engine.store_tiers.READ_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr("workers.kv_store.kv_store.WRITE_TIMEOUT_S", WAIT_S)
    made = config(tmp_path, kv_blocks=42)
    made = replace(made, cache=CacheConfig(ByteSize(64 * BLOCK_BYTES), made.cache.disk))
    prompts = [tuple(3 + (7 * position + 31 * number) % 200 for position in range(150)) for number in range(6)]
    clients, executors, listening = [], [], []
    for name in ("a", "b"):
        executors.append(await open_solo(replace(made, name=name), tiny, f"{name}-1", SharedMemory()))
        worker = await Worker.open(replace(made, name=name), f"{name}-1", executors[-1], heartbeat_s=0.25)
        clients.append(Client(worker))
        listening.append(asyncio.ensure_future(worker.subscribe("t", clients[-1].take)))
    await asyncio.sleep(0)
    answered = []
    for number, prompt in enumerate(prompts):
        answered.append(await clients[0].answer(number, prompt))
        await written(executors[0])  # it drops blocks while its host memory is full of others
    logs = [client.worker.engine.pool.log for client in clients]
    async with asyncio.timeout(WAIT_S):
        while len(logs[0].hashes(Tier.DISK)) < 3 or logs[1].hashes(Tier.DISK) != logs[0].hashes(Tier.DISK):
            await asyncio.sleep(0.01)
    hashes = logs[0].hashes(Tier.DISK)
    assert hashes <= {prefix_hash for prompt in prompts for prefix_hash in prefix_hashes(prompt)}
    on_disk = [number for number, prompt in enumerate(prompts) if set(prefix_hashes(prompt)) <= hashes]
    del on_disk[-1]  # perhaps its tail alone: the device evicts that first
    for number in on_disk:
        if number == on_disk[-1]:  # what has ended is read too
            listening[0].cancel()
            await clients[0].worker.close()
        tokens, cached = await clients[1].answer(number, prompts[number])
        assert tokens == answered[number][0] and cached > 0, "what was computed while it was read does not count"
    disk = disk_of(executors[1])
    assert disk is not None and disk.store.stats().peer_reads >= 16 * len(on_disk) > 16
    listening[1].cancel()
    await clients[1].worker.close()


def read_within_steps(executor: Rank, disk: DiskCache) -> None:
    """Reads begin with a step, which ends when nothing is read any more."""
    read, execute = disk.read, executor.execute
    wanted: list[Callable[[], None]] = []

    def wait(block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        wanted.append(partial(read, block_hash, block, timeout_s, done))

    async def execute_and_read(plan: StepPlan) -> StepResult:
        for each in wanted:
            each()
        wanted.clear()
        result = await execute(plan)
        while disk._tasks:
            await asyncio.sleep(0.001)
        return result

    disk.read, executor.execute = wait, execute_and_read


@pytest.mark.full
async def test_a_prefix_that_is_computed_from_the_front_and_read_from_the_back_gives_the_same_tokens(
    tiny: ModelFolder, tmp_path: Path
) -> None:
    made = config(tmp_path, kv_blocks=42)
    made = replace(made, cache=CacheConfig(ByteSize(64 * BLOCK_BYTES), made.cache.disk))
    prompts = [tuple(3 + (7 * position + 31 * number) % 200 for position in range(150)) for number in range(4)]
    answers: list[list[list[int]]] = []
    for is_stored in (False, True):
        executor = await open_solo(made, tiny, "w-1", SharedMemory())
        worker = await Worker.open(made, "w-1", executor, heartbeat_s=0.25)
        client = Client(worker)
        listening = asyncio.ensure_future(worker.subscribe("t", client.take))
        await asyncio.sleep(0)
        answers.append([])
        disk = disk_of(executor)
        assert disk is not None
        read_within_steps(executor, disk)
        for number, prompt in enumerate(prompts):
            worker.engine._stores[0].speed = ReadSpeed(150 / 18)  # as long as computing a block
            tokens, cached = await client.answer(number, prompt)
            answers[-1].append(tokens)
            if is_stored and number < 2:  # the last two prompts were on the device alone
                assert 0 < cached < 144, "some of it was computed, some was read"
        async with asyncio.timeout(WAIT_S):
            while disk.store._copies:
                await asyncio.sleep(0.001)
        listening.cancel()
        await worker.close()
    assert answers[0] == answers[1]
