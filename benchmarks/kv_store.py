"""The KV store beside raw reads and writes of its file by as many threads, its index with a million blocks, and what
`kv_tiers` measures.
"""

import asyncio
import os
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.kv_tiers import measure_tiers
from kvtransfer.layout import KVLayout
from workers.kv_store.io_threads import MAX_READS, MAX_WRITES, READ_THREADS, WRITE_THREADS
from workers.kv_store.kv_store import KVStore
from workers.kv_store.slab import SLAB_FILES, Slab, aligned_buffer
from workers.kv_store.slot_format import HASH_BYTES, fingerprint
from workers.kv_store.slot_index import SlotIndex

LAYOUT = KVLayout("bench", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)  # SmolLM2-135M: 720 KiB
NUM_SLOTS, QUICK_SLOTS = 512, 32
NUM_NAMES, QUICK_NAMES = 1_000_000, 50_000
PREFIX = 64  # blocks of a prompt that is looked up
ROUNDS = 5
TIMEOUT_S = 60.0
IO_TABLE = "KV store and raw I/O on the same file"
Rates = dict[tuple[str, str], list[float]]  # (row, column) -> one value a round


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """In the system's folder for temporary files (TMPDIR). Raises `KVStoreError` or `ModelError`."""
    num_slots = QUICK_SLOTS if quick else NUM_SLOTS
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        slab = Slab(Path(folder) / SLAB_FILES[0], num_slots, LAYOUT.block_bytes)
        mode = "direct" if slab.is_direct else "buffered"
        io = asyncio.run(_io(slab, rounds, progress))
        (Path(folder) / "tiers").mkdir()
        tiers = asyncio.run(measure_tiers(Path(folder) / "tiers", rounds, progress))
    index = _index(QUICK_NAMES if quick else NUM_NAMES, rounds)
    figures = (*_io_figures(io), *tiers.figures(), *index)
    return BenchmarkPart("kv-store", figures, (tiers.claim(),), (f"The file uses {mode} I/O.", *NOTES))


async def _io(slab: Slab, rounds: int, progress: Progress) -> Rates:
    made: Rates = defaultdict(list)
    blocks = [memoryview(bytearray(os.urandom(LAYOUT.block_bytes))) for _ in range(MAX_READS)]
    _raw(slab.write, slab, WRITE_THREADS)  # the first write of an allocated file is slower
    store = KVStore(slab, fingerprint(LAYOUT))
    for number in range(rounds):
        hashes = [_name(number * slab.num_slots + place) for place in range(slab.num_slots)]

        async def read(place: int, hashes: list[bytes] = hashes) -> bool:
            return await store.read(hashes[place], blocks[place % MAX_READS], TIMEOUT_S)

        async def write(place: int, hashes: list[bytes] = hashes) -> bool:
            return await store.write(hashes[place], blocks[place % MAX_READS])

        _note(made, "raw write", slab, lambda: _raw(slab.write, slab, WRITE_THREADS))
        _note(made, "raw read", slab, lambda: _raw(slab.read, slab, READ_THREADS))
        await _note_each(made, "write", slab, write, MAX_WRITES)
        await _note_each(made, "read", slab, read, MAX_READS)
        begun = time.perf_counter()
        slab.scan(lambda page: None)
        made["open", "headers read"].append(slab.num_slots / (time.perf_counter() - begun))
        progress(f"round {number + 1} of {rounds}")
    await store.close()
    return made


def _raw(io: Callable[[int, memoryview], None], slab: Slab, count: int) -> None:
    def part(first: int) -> None:
        buffer = aligned_buffer(slab.slot_bytes)
        for slot in range(first, slab.num_slots, count):
            io(slot, buffer)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(part, range(count)))


def _note(made: Rates, row: str, slab: Slab, work: Callable[[], None]) -> None:
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    _add(made, row, slab, time.perf_counter() - begun, time.process_time() - cpu)


async def _note_each(made: Rates, row: str, slab: Slab, work: Callable[[int], Awaitable[bool]], at_once: int) -> None:
    """All slots, each with one block, `at_once` at a time. Every one must succeed."""
    places = iter(range(slab.num_slots))

    async def some() -> None:
        for place in places:
            assert await work(place), f"{row} number {place} failed"

    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(some() for _ in range(at_once)))
    _add(made, row, slab, time.perf_counter() - begun, time.process_time() - cpu)


def _add(made: Rates, row: str, slab: Slab, seconds: float, cpu_s: float) -> None:
    made[row, "rate"].append(slab.num_slots * slab.slot_bytes / seconds)
    made[row, "CPU of a block"].append(cpu_s / slab.num_slots)


def _io_figures(made: Rates) -> Iterator[Figure]:
    units = {"rate": "GB/s", "CPU of a block": "us", "headers read": "1/s"}
    for (row, column), values in made.items():
        yield Figure(IO_TABLE, row, column, units[column], spread(values))
    for row in ("write", "read"):
        yield Figure(IO_TABLE, row, "share of raw", "x", ratios(made[row, "rate"], made[f"raw {row}", "rate"]))


def _index(num_names: int, rounds: int) -> tuple[Figure, ...]:
    tracemalloc.start()
    index = SlotIndex(num_names, ((_name(number), number) for number in range(num_names)))
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    prompts = [[_name(first + place) for place in range(PREFIX)] for first in range(0, num_names - PREFIX, 5003)]
    rates = [_lookups(index, prompts) for _ in range(rounds)]
    table = f"Index of {num_names} blocks"
    return (
        Figure(table, "index", "memory per million blocks", "MiB", spread([taken_bytes * 1e6 / num_names])),
        Figure(table, "index", f"block hashes looked up, {PREFIX} of a prompt", "1/s", spread(rates)),
    )


def _lookups(index: SlotIndex, prompts: Sequence[Sequence[bytes]]) -> float:
    begun = time.perf_counter()
    for hashes in prompts:
        assert index.match(hashes) == PREFIX
    return len(prompts) * PREFIX / (time.perf_counter() - begun)


def _name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little")


NOTES = (
    f"Blocks of {LAYOUT.block_bytes >> 10} KiB; {WRITE_THREADS} threads write and {READ_THREADS} read, raw and in the "
    "store; the store also copies and digests each block.",
)
