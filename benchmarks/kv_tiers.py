"""Host memory beside memcpy, and decodes while the disk tier writes: what of `kv-store` needs a model.

One worker's executor with one thread; the store writes on its own threads in the same process, as in a worker.
"""

import asyncio
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.figures import BenchmarkClaim, Figure, Progress, ratios, spread
from diptych.shapes import Shape
from kvtransfer.open import SharedMemory
from workers.config import ByteSize, CacheConfig, EngineConfig, TransferConfig, WorkerConfig
from workers.engine.step import StepPlan
from workers.engine.step_timing import num_blocks, step_plan
from workers.executor.rank import Rank
from workers.executor.rank_loader import open_solo
from workers.kv_store.io_threads import MAX_WRITES
from workers.kv_store.kv_store import KVStore
from workers.kv_store.slab import SLAB_FILES, Slab
from workers.kv_store.slot_format import HASH_BYTES, fingerprint
from workers.model.store import resolve

SHAPE = Shape(batch=8, context=512)
STEPS = 12  # of each turn
COPIED = 256  # blocks, 180 MiB
NUM_SLOTS = 512
MAX_SLOWER = 1.03
ALONE, FILLED, FULL = "nothing is written", "what they fill is written", "as much as possible is written"
HOST_TABLE = "Blocks restored from host memory, and memcpy of as many bytes"
DECODE_TABLE = f"Step of {SHAPE.batch} decodes with {SHAPE.context} tokens each, while the disk tier writes"


@dataclass(slots=True)
class TierTimes:
    """One value a round: bytes per second of copies, and seconds of a decode step."""

    copies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def figures(self) -> Iterator[Figure]:
        for row, rates in self.copies.items():
            yield Figure(HOST_TABLE, row, "rate", "GB/s", spread(rates))
            yield Figure(HOST_TABLE, row, "share of memcpy", "x", ratios(rates, self.copies["memcpy"]))
        for row, seconds in self.steps.items():
            yield Figure(DECODE_TABLE, row, "step", "ms", spread(seconds))
            yield Figure(DECODE_TABLE, row, "of a step alone", "x", ratios(seconds, self.steps[ALONE]))

    def claim(self) -> BenchmarkClaim:
        slower = [taken / alone for taken, alone in zip(self.steps[FILLED], self.steps[ALONE], strict=True)]
        return BenchmarkClaim("decodes while what they fill is written / alone", median(slower), MAX_SLOWER, "x")


async def measure_tiers(folder: Path, rounds: int, progress: Progress) -> TierTimes:
    """Raises `KVStoreError` or `ModelError`."""
    config = WorkerConfig(
        "tiers",
        "tiers",
        "smollm2-135m",
        EngineConfig(kv_blocks=600, threads=1),
        transfer=TransferConfig(backends=("memory",)),
        secret="tiers",
        cache=CacheConfig(ByteSize(384 << 20)),
    )
    executor = await open_solo(config, await asyncio.to_thread(resolve, config.model), "tiers-1", SharedMemory())
    layout = executor.facts.layout
    store = KVStore(Slab(folder / SLAB_FILES[0], NUM_SLOTS, layout.block_bytes), fingerprint(layout))
    taken, writer = TierTimes(), Writer(store, layout.block_bytes)
    try:
        await _copy(executor, TierTimes())  # the first use of memory is slower
        await _decode(executor, writer, FILLED, layout.block_size)
        for number in range(rounds):
            await _copy(executor, taken)
            for row in random.sample((ALONE, FILLED, FULL), 3):
                taken.steps[row].append(await _decode(executor, writer, row, layout.block_size))
            progress(f"host memory and decodes, round {number + 1} of {rounds}")
    finally:
        await store.close()
        await executor.close()
    return taken


async def _copy(executor: Rank, taken: TierTimes) -> None:
    num_bytes = COPIED * executor.facts.layout.block_bytes
    hosts = random.sample(range(COPIED), COPIED)
    out = StepPlan(0, (), swap_out=tuple((block, host) for block, host in enumerate(hosts)))
    back = StepPlan(0, (), swap_in=tuple((host, block) for block, host in enumerate(hosts)))
    source, target = (np.zeros(num_bytes, np.uint8) for _ in range(2))
    source[:], target[:] = 1, 2
    for plan in (out, back):
        begun_s = time.perf_counter()
        await executor.execute(plan)
        taken.copies["save" if plan is out else "restore"].append(num_bytes / (time.perf_counter() - begun_s))
    begun_s = time.perf_counter()
    np.copyto(target, source)
    taken.copies["memcpy"].append(num_bytes / (time.perf_counter() - begun_s))


class Writer:
    """Writes blocks of random bytes, each under a new block hash."""

    def __init__(self, store: KVStore, block_bytes: int) -> None:
        self._store = store
        self._blocks = cycle([memoryview(bytearray(os.urandom(block_bytes))) for _ in range(16)])
        self._number = 0

    async def write(self) -> None:
        self._number += 1
        await self._store.write(self._number.to_bytes(HASH_BYTES, "little"), next(self._blocks))

    async def write_on(self) -> None:
        while True:
            await self.write()


async def _decode(executor: Rank, writer: Writer, row: str, block_size: int) -> float:
    """The median seconds of a step, at its caller."""
    plan = step_plan(SHAPE, range(num_blocks(SHAPE, block_size)), block_size, executor.facts.vocab_size)
    at_once = MAX_WRITES // 2 if row == FULL else 0
    tasks = [asyncio.ensure_future(writer.write_on()) for _ in range(at_once)]
    filled, ends_s = 0.0, [time.perf_counter()]
    for _ in range(STEPS):
        filled += SHAPE.batch / block_size if row == FILLED else 0.0
        tasks += [asyncio.ensure_future(writer.write()) for _ in range(int(filled))]
        filled %= 1
        await executor.execute(plan)
        ends_s.append(time.perf_counter())
    for task in tasks:
        if at_once:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return median(end_s - begin_s for begin_s, end_s in pairwise(ends_s))
