"""KV transfer rate between two processes, beside one thread's memcpy of the same bytes.

A measurement is a whole pull through the public `TransportSet`, including its planning, as in a worker.
"""

import asyncio
import multiprocessing as mp
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from kvtransfer.digest import combine, digest_cells
from kvtransfer.layout import KVLayout
from kvtransfer.open import RESERVED_BLOCKS, TransportSet, open_transports
from kvtransfer.ticket import PeerAddress, Piece
from kvtransfer.transport import PullOrder, ReadStats, Region

BLOCK = KVLayout("bench", num_layers=8, num_kv_heads=2, head_dim=32, block_size=16)  # 64 KiB
SIZES = {"64 KiB": 1, "1 MiB": 16, "16 MiB": 256, "64 MiB": 1024}  # in blocks
QUICK_SIZES = {"64 KiB": 1, "1 MiB": 16}
BACKENDS = ("nixl", "tcp")
PATTERNS = ("contiguous", "scattered")
ROUNDS = 9
WAIT_S = 60.0
SECRET = b"benchmark"


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks to read and where to write them."""

    size: str
    pattern: str
    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.source) * BLOCK.block_bytes


@dataclass(frozen=True, slots=True)
class Pulled:
    """Seconds of one round: a pull without digests, a memcpy, a pull with digests, and its digests."""

    seconds: float
    copy_s: float
    checked_s: float
    digest_s: float


Samples = Mapping[tuple[str, str, str], Sequence[Pulled]]  # backend, size, pattern


def plans(sizes: Mapping[str, int], num_blocks: int) -> tuple[Plan, ...]:
    """Each size as one contiguous run, and as single blocks at random places on both sides."""
    made = []
    draw = random.Random(0)
    for size, count in sizes.items():
        run = tuple(range(RESERVED_BLOCKS, RESERVED_BLOCKS + count))
        made.append(Plan(size, "contiguous", run, run))
        places = range(RESERVED_BLOCKS, num_blocks)
        made.append(Plan(size, "scattered", tuple(draw.sample(places, count)), tuple(draw.sample(places, count))))
    return tuple(made)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """A backend that does not work here is left out with a note. Raises `TransferError` when a pull fails."""
    sizes = QUICK_SIZES if quick else SIZES
    num_blocks = 2 * max(sizes.values()) + RESERVED_BLOCKS
    samples, paths = asyncio.run(_measure(plans(sizes, num_blocks), num_blocks, rounds, progress))
    notes = (*paths, "GB/s of whole pulls between two processes of this host; 64 KiB blocks; memcpy by one thread.")
    return BenchmarkPart("transfer", figures(samples), (), notes)


async def _measure(
    planned: Sequence[Plan], num_blocks: int, rounds: int, progress: Progress
) -> tuple[Samples, tuple[str, ...]]:
    truth, region = pool_of(num_blocks, filled=True), pool_of(num_blocks, filled=False)
    with OwnerProcess(BACKENDS, 1, num_blocks) as owner:
        readers: dict[str, tuple[TransportSet, str]] = {}
        notes = []
        for backend in BACKENDS:
            opened = open_set(region, (backend,), f"reader-{backend}")
            if isinstance(opened, str):
                notes.append(f"{backend} was left out: {opened}")
                continue
            report = await opened.connect(owner.addresses[0], deadline_s=WAIT_S)
            readers[backend] = (opened, f"{backend}: {report.path}")
        try:
            samples = await _rounds(planned, rounds, readers, owner.addresses[0].incarnation, truth, region, progress)
        finally:
            for opened, _ in readers.values():
                await opened.close()
    return samples, (*notes, *(path for _, path in readers.values()))


async def _rounds(
    planned: Sequence[Plan],
    rounds: int,
    readers: Mapping[str, tuple[TransportSet, str]],
    peer: str,
    truth: Region,
    region: Region,
    progress: Progress,
) -> Samples:
    samples: dict[tuple[str, str, str], list[Pulled]] = defaultdict(list)
    for plan in planned:
        cells = digest_cells(truth, [(block, BLOCK.block_size) for block in plan.source])
        piece, num_tokens = Piece(0, BLOCK.heads, BLOCK.layers), len(plan.source) * BLOCK.block_size
        digests = ((piece, combine(cells, BLOCK, piece)),)
        plain = PullOrder(peer, plan.source, plan.target, 0, num_tokens, (), WAIT_S)
        checked = replace(plain, digests=digests)
        for number in range(rounds + 1):
            for backend, (reader, _) in readers.items():
                copy_s = copied_s(truth, region, plan)
                seconds, _ = await _pull(reader, plain)
                checked_s, stats = await _pull(reader, checked)
                if number:  # the first round touches the memory for the first time
                    samples[backend, plan.size, plan.pattern].append(
                        Pulled(seconds, copy_s, checked_s, stats.digest_seconds)
                    )
        progress(f"{plan.size} {plan.pattern}")
    return samples


async def _pull(reader: TransportSet, order: PullOrder) -> tuple[float, ReadStats]:
    begun = time.perf_counter()
    stats = await reader.pull(order).done
    return time.perf_counter() - begun, stats


def copied_s(source: Region, target: Region, plan: Plan) -> float:
    """Seconds of one thread to copy the same bytes: in one piece, or block by block to the same places."""
    size = BLOCK.block_bytes
    if plan.pattern == "contiguous":
        pieces = [(plan.source[0] * size, plan.target[0] * size, plan.num_bytes)]
    else:
        pieces = [(a * size, b * size, size) for a, b in zip(plan.source, plan.target, strict=True)]
    pairs = [
        (np.frombuffer(target.bytes(b, length), np.uint8), np.frombuffer(source.bytes(a, length), np.uint8))
        for a, b, length in pieces
    ]
    begun = time.perf_counter()
    for into, out_of in pairs:
        np.copyto(into, out_of)
    return time.perf_counter() - begun


def figures(samples: Samples) -> tuple[Figure, ...]:
    made: list[Figure] = []
    sizes = {size: count * BLOCK.block_bytes for size, count in SIZES.items()}
    for (backend, size, pattern), rounds in samples.items():
        row = f"{size} {pattern}"
        rate = spread(sizes[size] / each.seconds for each in rounds)
        copy_rate = spread(sizes[size] / each.copy_s for each in rounds)
        share = ratios([each.copy_s for each in rounds], [each.seconds for each in rounds])
        cost = spread(each.digest_s / each.checked_s for each in rounds)
        made += [
            Figure("Transfer between two processes", row, "memcpy, 1 thread", "GB/s", copy_rate),
            Figure("Transfer between two processes", row, backend, "GB/s", rate),
            Figure("Transfer as a share of memcpy's speed", row, backend, "x", share),
            Figure("Digests as a share of a checked pull", row, backend, "%", cost),
        ]
    return tuple(made)


def pool_of(num_blocks: int, *, filled: bool) -> Region:
    size = num_blocks * BLOCK.block_bytes
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8) if filled else np.zeros(size, np.uint8)
    return Region(BLOCK, num_blocks, array.ctypes.data, array)


def open_set(region: Region, backends: tuple[str, ...], incarnation: str) -> TransportSet | str:
    """The transports, or the reason why they do not open."""
    from kvtransfer.errors import TransportUnavailable

    try:
        return open_transports(region, backends, incarnation=incarnation, secret=SECRET, host="127.0.0.1")
    except TransportUnavailable as error:
        return str(error)


class OwnerProcess:
    """Another process with `count` filled pools of `num_blocks` blocks each."""

    def __init__(self, backends: tuple[str, ...], count: int, num_blocks: int) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=own, args=(theirs, backends, count, num_blocks), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "OwnerProcess":
        if not self._pipe.poll(WAIT_S):
            self.__exit__()
            raise TimeoutError(f"the owner's process did not open its pools in {WAIT_S:.0f} s")
        self.addresses: list[PeerAddress] = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the process ends with its pipe
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def own(pipe: Connection, backends: tuple[str, ...], count: int, num_blocks: int) -> None:
    """The owner's process: opens every backend that works here, and waits until the pipe closes."""
    addresses = []
    sets = []  # kept open
    for name in (f"owner-{number}" for number in range(count)):
        opened = open_set(pool_of(num_blocks, filled=True), backends, name)
        assert isinstance(opened, TransportSet), opened
        sets.append(opened)
        addresses.append(PeerAddress(name, name, "127.0.0.1", 0, (opened.shard(),)))
    pipe.send(addresses)
    try:
        pipe.recv()
    except EOFError:
        return
