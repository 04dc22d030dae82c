"""The first token of a prompt whose prefix is on a disk, or on another worker: computed, loaded, or both at once.

Workers in this process; the other one is read over TCP. A length of 1,536 tokens is 96 blocks. The disk or the link is
as fast as it is, or slowed down so that reading all of the prompt takes so many times as long as computing it. At each
speed the strategies take turns, from the first prompt after the change on. Their noise is how much the better of
computing and reading differs from itself: its even turns over its odd ones.
"""

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from benchmarks.timed_request import random_prompt
from kvtransfer.open import SharedMemory
from kvtransfer.transport import PullOrder, Read
from workers.config import ByteSize, CacheConfig, DiskCacheConfig, EngineConfig, TransferConfig, WorkerConfig
from workers.engine.block_store import BlockStore
from workers.engine.blocks import block_hashes
from workers.engine.kv_event_log import Tier
from workers.engine.store_tiers import READS_AT_ONCE
from workers.executor.rank import Rank
from workers.executor.rank_loader import open_rank
from workers.model.store import resolve
from workers.request import EngineOutputs, Request, SamplingParams, TokensOut
from workers.stats import TierStats
from workers.worker import Worker

ROUNDS = 3
LENGTHS, QUICK_LENGTHS = (128, 512, 1536), (128,)
SPEEDS = {"own": 0.0} | {f"{slow:g}": slow for slow in (0.25, 0.5, 1.0, 2.0, 4.0)}  # reading beside computing
TURNS = {128: 7, 512: 5, 1536: 3}  # of all strategies in a round. Short prompts take milliseconds.
MOST_READ = 1.0  # more than that is not worth the benchmark's time: computing is better
COMPUTE, READ, BOTH, LOADED = "compute", "read", "both", "already loaded"
MOST_OF_BETTER = 1.05
BLOCK = 16
TIMEOUT_S = 120.0

DISK, LINK = "a disk", "another worker"
T = TypeVar("T")

Samples = dict[tuple[int, str, str], list[float]]  # (length, speed of the disk, strategy) -> seconds of each round


class SlowedStore:
    """A store whose reads end one after the other, `block_s` each, or when they end if that is later."""

    tier = Tier.DISK
    shared_as = ""

    def __init__(self, store: BlockStore) -> None:
        self.block_s = 0.0
        self.changed: Callable[[], None] = lambda: None
        self.read_byte_s = store.read_byte_s
        self.written = asyncio.Semaphore(0)  # released for each block
        self.watch, self.find, self.forget = store.watch, store.find, store.forget
        self.num_reading = 0
        self._store = store
        self._free_s = 0.0

    def write(self, block_hash: bytes, prefix: int | None, block: int, done: Callable[[bool], None]) -> None:
        def ended(is_there: bool) -> None:
            done(is_there)
            self.written.release()

        self._store.write(block_hash, prefix, block, ended)

    def read(self, block_hash: bytes, block: int, timeout_s: float, done: Callable[[bool, float], None]) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        self._free_s = due_s = max(self._free_s, begun_s) + self.block_s

        def end(arrived: bool) -> None:
            self.num_reading -= 1
            done(arrived, loop.time() - begun_s)
            self.changed()

        self.num_reading += 1
        self._store.read(block_hash, block, timeout_s, lambda arrived, _: _at(due_s, end, arrived))

    def stats(self) -> TierStats:
        return self._store.stats()


def _at(due_s: float, end: Callable[[bool], None], arrived: bool) -> None:
    asyncio.get_running_loop().call_at(due_s, end, arrived)


def slow_disk(rank: Rank) -> SlowedStore:
    """The rank's disk can be slowed down. Call it before the rank's worker opens."""
    (disk,) = rank.stores(lambda: None)
    slowed = SlowedStore(disk)

    def stores(changed: Callable[[], None]) -> tuple[BlockStore, ...]:
        slowed.changed = changed
        return (slowed,)

    rank.stores = stores  # type: ignore[assignment, method-assign]
    return slowed


class SlowedLink:
    """A rank's reads end one after the other, `block_s` for each block, or when they end if that is later."""

    def __init__(self, rank: Rank) -> None:
        self.block_s = 0.0
        self._free_s = 0.0
        self._pull = rank.pull
        rank.pull = self.pull  # type: ignore[method-assign]

    def pull(self, order: PullOrder) -> Read:
        read, loop = self._pull(order), asyncio.get_running_loop()
        self._free_s = due_s = max(self._free_s, loop.time()) + self.block_s * len(order.target_blocks)
        late = Read(loop.create_future(), loop.create_future())
        _later(due_s, read.done, late.done)
        _later(due_s, read.settled, late.settled)
        return late


def _later(due_s: float, source: "asyncio.Future[T]", target: "asyncio.Future[T]") -> None:
    def copy() -> None:
        if target.done():
            return
        if (error := source.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(source.result())

    source.add_done_callback(lambda _: asyncio.get_running_loop().call_at(due_s, copy))


class LoadingBench:
    """The worker and its client, and what is slowed down. Close the worker."""

    def __init__(self, worker: Worker, slowed: SlowedStore | SlowedLink) -> None:
        self.worker = worker
        self.slowed = slowed
        self._number = 0
        self._first = asyncio.Event()

    def take(self, message: EngineOutputs) -> None:
        if any(isinstance(each, TokensOut) for each in message.outputs):
            self._first.set()

    async def ask(self, prompt: tuple[int, ...], tenant: str = "") -> float:
        """Seconds until the first token."""
        self._number += 1
        self._first.clear()
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=1)
        begun_s = time.perf_counter()
        await self.worker.generate(Request(f"r{self._number}", prompt, sampling, reply_to="b", tenant=tenant))
        async with asyncio.timeout(TIMEOUT_S):
            await self._first.wait()
        return time.perf_counter() - begun_s

    async def forget(self) -> None:
        """The device and host memory are empty, and nothing is being read; the disk is not empty."""
        await self._settle()
        self.worker.engine.pool.clear_cache()

    async def _settle(self) -> None:
        """Nothing is being read."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.is_reading:
                await asyncio.sleep(0.0005)
                self.worker.engine.check()

    @property
    def is_reading(self) -> bool:
        """Whether anything is being fetched."""
        return len(self.worker.engine.prefix_fetches) > 0

    async def compute(self, prompt: tuple[int, ...]) -> float:
        await self.forget()
        return await self.ask(prompt, tenant=f"compute {self._number}")


class LinkBench(LoadingBench):
    """Another worker has the prompts."""

    def __init__(self, worker: Worker, link: SlowedLink, owner: Worker) -> None:
        super().__init__(worker, link)
        self._owner = owner

    async def store(self, prompt: tuple[int, ...]) -> None:
        await self._owner.warm(Request("warm", prompt, SamplingParams(seed=1, max_tokens=1)), 0.0, TIMEOUT_S)

    async def _fetch(self, prompt: tuple[int, ...]) -> None:
        """Begin to."""
        request = Request(f"f{self._number}", prompt, SamplingParams())
        ticket = await self._owner.hold_prefix(request)
        assert ticket is not None, "the owner has evicted the prompt"
        assert await self.worker.fetch_prefix(request, ticket, TIMEOUT_S), "the prompt cannot be fetched"

    async def both(self, prompt: tuple[int, ...]) -> float:
        """What a dispatcher does."""
        await self.forget()
        begun_s = time.perf_counter()
        await self._fetch(prompt)
        await self.ask(prompt)
        return time.perf_counter() - begun_s

    async def read(self, prompt: tuple[int, ...]) -> tuple[float, float]:
        """Fetch all blocks, then ask. Returns the seconds of both, and of the second part alone."""
        await self.forget()
        begun_s = time.perf_counter()
        await self._fetch(prompt)
        await self._settle()
        asked_s = await self.ask(prompt)
        return time.perf_counter() - begun_s, asked_s


class DiskBench(LoadingBench):
    """The worker's disk has them."""

    def __init__(self, worker: Worker, disk: SlowedStore) -> None:
        super().__init__(worker, disk)
        self.disk = disk

    @property
    def is_reading(self) -> bool:
        """Also what computing has passed since its read began."""
        return self.disk.num_reading > 0

    async def store(self, prompt: tuple[int, ...]) -> None:
        """Have the prompt on the disk."""
        engine = self.worker.engine
        engine.pin(Request("pin", prompt, SamplingParams()), TIMEOUT_S, asyncio.get_running_loop().time())
        await self.ask(prompt)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(len(prompt) // BLOCK):
                await self.disk.written.acquire()
        engine.unpin(None)
        await self.forget()

    async def both(self, prompt: tuple[int, ...]) -> float:
        """What the engine does."""
        await self.forget()
        return await self.ask(prompt)

    async def read(self, prompt: tuple[int, ...]) -> tuple[float, float]:
        """Read all blocks, then ask. Returns the seconds of both, and of the second part alone."""
        await self.forget()
        begun_s = time.perf_counter()
        hashes = iter(block_hashes(prompt, BLOCK)[: (len(prompt) - 1) // BLOCK])
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(self._read_some(hashes) for _ in range(READS_AT_ONCE)))
        read_s = time.perf_counter() - begun_s
        asked_s = await self.ask(prompt)
        return read_s + asked_s, asked_s

    async def _read_some(self, hashes: Iterable[bytes]) -> None:
        host = self.worker.engine.pool.host
        for block_hash in hashes:
            block = host.load(block_hash)
            assert block is not None, "host memory is too small"
            ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self.disk.read(block_hash, block, TIMEOUT_S, partial(_end, ended))
            host.loaded(block, None, arrived=await ended)


def _end(ended: "asyncio.Future[bool]", arrived: bool, _: float) -> None:
    ended.set_result(arrived)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """In the system's folder for temporary files (TMPDIR). Raises `KVStoreError` or `ModelError`."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    with tempfile.TemporaryDirectory(prefix="diptych-loading-") as folder:
        measured = {
            LINK: asyncio.run(_from_a_worker(lengths, rounds, progress)),
            DISK: asyncio.run(_from_a_disk(folder, lengths, rounds, progress)),
        }
    made = [each for source, samples in measured.items() for each in figures(samples, source)]
    claimed = [each for source, samples in measured.items() for each in claims(samples, source)]
    return BenchmarkPart("loading", tuple(made), tuple(claimed), NOTES)


def _config(name: str, **fields: Any) -> WorkerConfig:
    engine = EngineConfig(kv_blocks=512, block_size=BLOCK)
    transfer = TransferConfig(backends=("tcp",), host="127.0.0.1")
    return WorkerConfig(name, "loading", "smollm2-135m", engine, transfer=transfer, secret="loading", **fields)


async def _opened(config: WorkerConfig, prepare: Callable[[Rank], T]) -> tuple[Worker, T]:
    rank = await open_rank(config, await asyncio.to_thread(resolve, config.model), config.name, SharedMemory())
    prepared = prepare(rank)
    return await Worker.open(config, config.name, rank, heartbeat_s=0.25), prepared


async def _from_a_disk(folder: str, lengths: Sequence[int], rounds: int, progress: Progress) -> Samples:
    cache = CacheConfig(ByteSize(384 << 20), DiskCacheConfig(folder, ByteSize(512 << 20)), pins=ByteSize(128 << 20))
    worker, disk = await _opened(_config("w", cache=cache), slow_disk)
    try:
        return await _measured(DiskBench(worker, disk), DISK, lengths, rounds, progress)
    finally:
        await worker.close()


async def _from_a_worker(lengths: Sequence[int], rounds: int, progress: Progress) -> Samples:
    worker, link = await _opened(_config("reader"), SlowedLink)
    owner, _ = await _opened(_config("owner"), lambda rank: None)
    try:
        await worker.connect(await owner.address())
        return await _measured(LinkBench(worker, link, owner), LINK, lengths, rounds, progress)
    finally:
        await worker.close()
        await owner.close()


async def _measured(
    bench: "DiskBench | LinkBench", source: str, lengths: Sequence[int], rounds: int, progress: Progress
) -> Samples:
    samples: Samples = defaultdict(list)
    listening = asyncio.ensure_future(bench.worker.subscribe("b", bench.take))
    try:
        await asyncio.sleep(0)
        draw = random.Random(0)
        prompts = [random_prompt(draw, length) for length in lengths]
        for prompt in prompts:
            await bench.store(prompt)
        compute_s = {prompt: await bench.compute(prompt) for prompt in prompts}  # the first time
        for number in range(rounds):
            for speed in SPEEDS:
                for prompt in prompts:
                    bench.slowed.block_s = SPEEDS[speed] * compute_s[prompt] / ((len(prompt) - 1) // BLOCK)
                    for _ in range(TURNS[len(prompt)]):
                        await _take_turns(bench, prompt, speed, samples)
                    compute_s[prompt] = median(samples[len(prompt), speed, COMPUTE])
                progress(f"from {source}, round {number + 1} of {rounds}: {speed} times as long as computing")
    finally:
        listening.cancel()
    return samples


async def _take_turns(bench: "DiskBench | LinkBench", prompt: tuple[int, ...], speed: str, samples: Samples) -> None:
    length = len(prompt)
    samples[length, speed, BOTH].append(await bench.both(prompt))
    samples[length, speed, COMPUTE].append(await bench.compute(prompt))
    if SPEEDS[speed] <= MOST_READ:
        took_s, loaded_s = await bench.read(prompt)
        samples[length, speed, READ].append(took_s)
        if not SPEEDS[speed]:
            samples[length, speed, LOADED].append(loaded_s)


def figures(samples: Samples, source: str) -> tuple[Figure, ...]:
    made = []
    for (length, speed, strategy), taken in samples.items():
        table = f"{length:,} tokens from {source}: TTFT, by how long reading takes beside computing"
        made.append(Figure(table, speed, strategy, "ms", spread(taken)))
        if strategy == BOTH:
            made.append(Figure(table, speed, "both / better", "x", spread([share(samples, length, speed)])))
            made.append(Figure(table, speed, "noise", "x", spread([noise(better(samples, length, speed))])))
    return tuple(made)


def better(samples: Samples, length: int, speed: str) -> list[float]:
    """Of computing and reading the one with the lower median."""
    kinds = samples[length, speed, COMPUTE], samples.get((length, speed, READ))
    return min((taken for taken in kinds if taken), key=median)


def share(samples: Samples, length: int, speed: str) -> float:
    """Both at once over the better of the two, medians."""
    return median(samples[length, speed, BOTH]) / median(better(samples, length, speed))


def noise(taken: Sequence[float]) -> float:
    """The medians of even and odd samples of one strategy, the larger over the smaller; one sample: 1."""
    halves = median(taken[::2]), median(taken[1::2] or taken)
    return max(halves) / min(halves)


def claims(samples: Samples, source: str) -> tuple[BenchmarkClaim, ...]:
    shares = [share(samples, length, speed) for length, speed, strategy in samples if strategy == BOTH]
    name = f"from {source}: both at once / the better of the two, at worst"
    return (BenchmarkClaim(name, max(shares), MOST_OF_BETTER, "x"),)


NOTES = (
    f"Blocks of {BLOCK} tokens. Reading that takes longer than {MOST_READ:g} times as long as computing is not timed.",
)
