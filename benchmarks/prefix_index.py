"""A gateway's prefix index of 1, 10 and 100 million blocks on 64 workers: memory, lookups and changes.

Each size in a process of its own. Blocks of 16 tokens have a prefix hash for every eighth. CPU time: nothing waits.
"""

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from resource import getpagesize

from benchmarks.figures import BenchmarkPart, Figure, Progress, spread
from cluster.offline.process_pool import ProcessPool
from cluster.policy.routing.prefix_index import HASH_BLOCK_SIZE, PrefixIndex
from workers.engine.kv_event_log import MAX_HASHES
from workers.kv_events import HashChanges, KVEvents

ROUNDS = 3
BLOCK_SIZE = 16
NUM_WORKERS = 64
BLOCKS, QUICK_BLOCKS = (1_000_000, 10_000_000, 100_000_000), (1_000_000,)  # of all workers
PROMPTS = (1000, 8000)  # tokens
HOT = 100  # prompts that every worker has; half of the lookups
COUNT = 5000  # lookups, and changes
Measured = dict[tuple[str, str], float]  # (column, unit) -> value


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    figures: list[Figure] = []
    for num_blocks in QUICK_BLOCKS if quick else BLOCKS:
        row, taken = f"{num_blocks:,} blocks", defaultdict[tuple[str, str], list[float]](list)
        for _ in range(rounds):
            with ProcessPool(1) as process:
                for key, value in process.submit(measured, num_blocks).result().items():
                    taken[key].append(value)
        figures += [Figure("Prefix index", row, column, unit, spread(all_)) for (column, unit), all_ in taken.items()]
        progress(row)
    return BenchmarkPart("prefix-index", tuple(figures))


def measured(num_blocks: int) -> Measured:
    """In a new process: an index of blocks of which each is on one worker, and of `HOT` prompts that are on all."""
    draw, index, taking_s = random.Random(0), PrefixIndex(), 0.0
    begin_bytes = _memory_bytes()
    each = num_blocks * BLOCK_SIZE // HASH_BLOCK_SIZE // NUM_WORKERS
    longest = max(PROMPTS) // HASH_BLOCK_SIZE
    some: list[tuple[int, ...]] = []  # of one worker
    for number in range(NUM_WORKERS):
        for left in range(each, 0, -MAX_HASHES):
            hashes = tuple(draw.getrandbits(60) for _ in range(min(left, MAX_HASHES)))
            events = KVEvents(0, 1, 1, HASH_BLOCK_SIZE, disk=HashChanges(hashes))
            taking_s += _seconds(partial(index.take, f"w{number}", "1", events))
            if len(some) < COUNT // 20:
                some.append(hashes[:longest])
    million = 1_000_000 * BLOCK_SIZE / (each * NUM_WORKERS * HASH_BLOCK_SIZE)
    found: Measured = {("memory of a million blocks", "MiB"): (_memory_bytes() - begin_bytes) * million}
    hot = [tuple(draw.getrandbits(60) for _ in range(longest)) for _ in range(HOT)]
    for number in range(NUM_WORKERS):
        for hashes in hot:
            index.take(f"w{number}", "1", KVEvents(1, 2, 2, HASH_BLOCK_SIZE, device=HashChanges(hashes)))
    for num_tokens in PROMPTS:
        prompts = [draw.choice(hot if number % 2 else some)[: num_tokens // HASH_BLOCK_SIZE] for number in range(COUNT)]
        seconds = sum(_seconds(partial(index.matches, prompt)) for prompt in prompts)
        found[f"lookups of {num_tokens:,} tokens", "1/s"] = COUNT / seconds
    found["take a million blocks", "s"] = taking_s * million
    gone = tuple(draw.getrandbits(60) for _ in range(COUNT))
    index.take("w0", "1", KVEvents(2, 3, 3, HASH_BLOCK_SIZE, disk=HashChanges(gone)))
    changes = [
        KVEvents(3, 4, 4, HASH_BLOCK_SIZE, disk=HashChanges((draw.getrandbits(60),), (prefix_hash,)))
        for prefix_hash in gone
    ]
    change_s = sum(_seconds(partial(index.take, "w0", "1", change)) for change in changes) / COUNT
    return found | {("change of a hash", "us"): change_s}


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def _memory_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
