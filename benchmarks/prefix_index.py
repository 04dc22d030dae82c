"""A gateway's prefix index and a worker's cache log with up to a hundred million blocks, in processes of their own.

Blocks of 16 tokens have a name for every eighth. CPU time, because nothing here waits.
"""

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from resource import getpagesize

from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from cluster.policy.routing.prefix_index import GRAIN, PrefixIndex
from workers.engine.cache_log import MOST_NAMES, CacheLog, Tier
from workers.kv_events import KVEvents, NameChanges

ROUNDS = 3
BLOCK_SIZE = 16
BLOCKS, QUICK_BLOCKS = (1_000_000, 10_000_000, 100_000_000), (1_000_000,)  # of all workers
WORKERS = (8, 64)
PROMPTS = {"1,000": 1000, "8,000": 8000}  # tokens
LONGEST = 8000 // GRAIN
HOT = 100  # of the prompts that every worker has
COUNT = 5000  # lookups, and changes
Measured = dict[tuple[str, str], float]  # (column, unit) -> value


class _Process:
    """Memory that this process has taken since."""

    def __init__(self) -> None:
        gc.collect()
        self._begin = self._bytes()

    @staticmethod
    def _bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()

    @property
    def taken(self) -> int:
        gc.collect()
        return self._bytes() - self._begin


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def _names(draw: random.Random, count: int) -> Iterator[tuple[int, ...]]:
    """As many names, in replies."""
    for left in range(count, 0, -MOST_NAMES):
        yield tuple(draw.getrandbits(60) for _ in range(min(left, MOST_NAMES)))


def of_index(num_blocks: int, num_workers: int) -> Measured:
    """A gateway's index of blocks of which each is on one worker, and of `HOT` prompts that are on all."""
    draw = random.Random(0)
    process = _Process()
    index = PrefixIndex()
    each = num_blocks * BLOCK_SIZE // GRAIN // num_workers
    taking_s = 0.0
    some: list[tuple[int, ...]] = []  # of one worker
    for number in range(num_workers):
        for names in _names(draw, each):
            events = KVEvents(0, 1, 1, GRAIN, disk=NameChanges(names))
            taking_s += _seconds(partial(index.take, f"w{number}", "1", events))
            if len(some) < COUNT // 20:
                some.append(names[:LONGEST])
    taken = process.taken
    hot = [tuple(draw.getrandbits(60) for _ in range(LONGEST)) for _ in range(HOT)]
    for number in range(num_workers):
        for names in hot:
            index.take(f"w{number}", "1", KVEvents(1, 2, 2, GRAIN, device=NameChanges(names)))
    num_names = each * num_workers
    million = 1_000_000 / (num_names * GRAIN // BLOCK_SIZE)
    found: Measured = {("memory of a million blocks", "MiB"): taken * million}
    for label, num_tokens in PROMPTS.items():
        prompts = [draw.choice(hot if number % 2 else some)[: num_tokens // GRAIN] for number in range(COUNT)]
        begun_s = time.process_time()
        for prompt in prompts:
            index.matches(prompt)
        found[f"lookups of {label} tokens", "1/s"] = COUNT / (time.process_time() - begun_s)
    found["take a million blocks", "s"] = taking_s * million
    gone = next(_names(draw, COUNT))
    index.take("w0", "1", KVEvents(2, 3, 3, GRAIN, disk=NameChanges(gone)))
    changes = [KVEvents(3, 4, 4, GRAIN, disk=NameChanges((draw.getrandbits(60),), (name,))) for name in gone]
    begun_s = time.process_time()
    for change in changes:
        index.take("w0", "1", change)
    return found | {("change of a name", "us"): (time.process_time() - begun_s) / COUNT}


def of_log(num_blocks: int, num_workers: int) -> Measured:
    """The log of one of the workers."""
    draw = random.Random(0)
    process = _Process()
    log = CacheLog(BLOCK_SIZE)
    num_names = num_blocks * BLOCK_SIZE // GRAIN // num_workers
    for name in (name for names in _names(draw, num_names) for name in names):
        log.add(Tier.DISK, name)
    million = 1_000_000 / (num_names * GRAIN // BLOCK_SIZE)
    found: Measured = {("memory of a million blocks", "MiB"): process.taken * million}
    replies_s: list[float] = []
    last = reach = 0
    while not replies_s or reach < last:
        begun_s = time.process_time()
        events = log.since(last, reach)
        replies_s.append(time.process_time() - begun_s)
        last, reach = events.last, events.reach
    found["answer with a million blocks", "s"] = sum(replies_s) * million
    found["longest reply", "ms"] = max(replies_s)
    gone = list(islice(log.names(Tier.DISK), COUNT))

    def change() -> None:
        for name in gone:
            log.remove(Tier.DISK, name)
            log.add(Tier.DISK, name ^ 1)

    return found | {("change of a name", "us"): _seconds(change) / COUNT}


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    figures: list[Figure] = []
    for table, of, numbers in (
        ("Prefix index of a gateway", of_index, WORKERS),
        ("Cache log of one of the workers", of_log, WORKERS[:1]),
    ):
        for num_blocks in QUICK_BLOCKS if quick else BLOCKS:
            for num_workers in numbers:
                row = f"{num_blocks:,} blocks, {num_workers} workers"
                taken: dict[tuple[str, str], list[float]] = defaultdict(list)
                for _ in range(rounds):
                    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                        for key, value in process.submit(of, num_blocks, num_workers).result().items():
                            taken[key].append(value)
                figures += [Figure(table, row, column, unit, spread(all_)) for (column, unit), all_ in taken.items()]
                progress(f"{table}: {row}")
    return BenchmarkPart("prefix-index", tuple(figures))
