"""The part `gang-reshard`: copy plans of a prompt's KV between workers of different parallelism. Nothing is copied.

The KV is that of SmolLM2-135M in float32: 30 layers, 3 heads of 64. A prompt's blocks are one ascending run, or, when
fragmented, at random places on both sides.
"""

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from kvtransfer.copies import pieces_of, plan_copies
from kvtransfer.layout import KVLayout

ROUNDS = 3
REPEATS = 5  # of one plan in a round; the median counts, because another process may take the core for 5 ms
WHOLE = KVLayout("bench", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
OTHER_BLOCK_SIZE = 32
SPLITS = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))  # (tensor, pipeline)
QUICK_SPLITS = ((1, 1), (2, 2))
REQUEST_TOKENS = 1_000
LONG_TOKENS = 32_000
MAX_PLANNING_S = 0.002
COPIED_BYTES = 64 << 20

Split = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Resharding:
    """Copy plans of all ranks of the reader for one prompt, and the planning time and bytes of the slowest rank."""

    num_descriptors: int
    num_bytes: int
    slowest_s: float
    slowest_bytes: int


@dataclass(frozen=True, slots=True)
class ReshardCase:
    """A prompt of `num_tokens`, and how the reader's blocks differ from the owner's."""

    num_tokens: int
    fragmented: bool
    reader_block_size: int = WHOLE.block_size
    staged: bool = False  # copied through a staging area, as between workers of different block sizes

    def __str__(self) -> str:
        sizes = f"blocks of {WHOLE.block_size}"
        if self.reader_block_size != WHOLE.block_size:
            sizes = f"{sizes} into blocks of {self.reader_block_size}{', staged' if self.staged else ''}"
        return f"{self.num_tokens:,} tokens, {'fragmented' if self.fragmented else 'ascending'} {sizes}"


CASES = tuple(
    ReshardCase(num_tokens, fragmented, size, staged)
    for num_tokens in (REQUEST_TOKENS, LONG_TOKENS)
    for size, staged in ((WHOLE.block_size, False), (OTHER_BLOCK_SIZE, True), (OTHER_BLOCK_SIZE, False))
    for fragmented in (False, True)
)
Samples = Mapping[tuple[ReshardCase, Split, Split], Sequence[Resharding]]  # owner, reader


def shards(split: Split, whole: KVLayout = WHOLE) -> tuple[KVLayout, ...]:
    """The layouts of a gang's ranks, in order of stages. At most as many tensor ranks as KV heads."""
    tensor, pipeline = split

    def share(total: int, parts: int, part: int) -> tuple[int, int]:
        return part * total // parts, (part + 1) * total // parts

    return tuple(
        replace(
            whole,
            layers=share(whole.num_layers, pipeline, stage),
            heads=share(whole.num_kv_heads, tensor, rank),
        )
        for stage in range(pipeline)
        for rank in range(tensor)
    )


def blocks(count: int, fragmented: bool, seed: int) -> tuple[int, ...]:
    """`count` block ids."""
    return tuple(random.Random(seed).sample(range(4 * count), count)) if fragmented else tuple(range(1, count + 1))


def resharding(case: ReshardCase, owner: Split, reader: Split) -> Resharding:
    sources = shards(owner)
    targets = shards(reader, replace(WHOLE, block_size=case.reader_block_size))
    form: KVLayout
    there: Sequence[int]
    source_blocks = blocks(WHOLE.blocks_for(case.num_tokens), case.fragmented, 1)
    target_blocks = blocks(targets[0].blocks_for(case.num_tokens), case.fragmented, 2)
    ranks = []
    for rank, target in enumerate(targets):
        taken_s = []
        for _ in range(REPEATS if case.num_tokens == LONG_TOKENS else 1):
            begun_s = time.perf_counter()
            plans = []
            for piece in pieces_of(sources, target, rank):
                source = sources[piece.shard]
                form, there = target, target_blocks
                if case.staged:
                    form, there = replace(source, heads=piece.heads, layers=piece.layers), range(len(source_blocks))
                plans.append(plan_copies(piece, source, form, source_blocks, there, 0, case.num_tokens))
            taken_s.append(time.perf_counter() - begun_s)
        num_bytes = sum(int(plan[:, 2].sum()) for plan in plans)
        ranks.append((median(taken_s), sum(len(plan) for plan in plans), num_bytes))
    slowest_s, _, slowest_bytes = max(ranks)
    return Resharding(sum(each[1] for each in ranks), sum(each[2] for each in ranks), slowest_s, slowest_bytes)


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    splits = QUICK_SPLITS if quick else SPLITS
    samples: dict[tuple[ReshardCase, Split, Split], list[Resharding]] = defaultdict(list)
    copied_s: list[float] = []
    for number in range(rounds):
        copied_s.append(seconds_per_byte())
        for case in CASES:
            for owner in splits:
                for reader in splits:
                    samples[case, owner, reader].append(resharding(case, owner, reader))
        progress(f"round {number + 1} of {rounds}")
    return BenchmarkPart("gang-reshard", figures(samples, copied_s), claims(samples), NOTES)


def seconds_per_byte() -> float:
    """Seconds per byte of a copy by one thread."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.ones(COPIED_BYTES, np.uint8)
    begun_s = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - begun_s) / COPIED_BYTES


PAIRS = "All pairs"


def figures(samples: Samples, copied_s: Sequence[float]) -> tuple[Figure, ...]:
    made: list[Figure] = []
    for (case, owner, reader), taken in samples.items():
        row, column = f"owner {split_name(owner)}", f"reader {split_name(reader)}"
        if case.num_tokens == REQUEST_TOKENS:
            title, unit, values = f"Descriptors: {case}", "n", [float(taken[0].num_descriptors)]  # in every round
        else:
            title, unit, values = f"Planning: {case}", "us", [each.slowest_s for each in taken]
        made.append(Figure(title, row, column, unit, spread(values)))
    token_bytes = WHOLE.block_bytes // WHOLE.block_size
    for case in CASES:
        pairs = [taken for (each, _, _), taken in samples.items() if each == case]
        moved = spread(taken[0].num_bytes / (case.num_tokens * token_bytes) for taken in pairs)
        made.append(Figure(PAIRS, str(case), "bytes moved / bytes of the tokens, by pair", "x", moved))
        if case.num_tokens == LONG_TOKENS:
            shares = spread(
                max(each.slowest_s / (each.slowest_bytes * copy_s) for each in round_)
                for round_, copy_s in zip(zip(*pairs, strict=True), copied_s, strict=True)
            )
            made.append(Figure(PAIRS, str(case), "most planning / memcpy of the same bytes, by round", "%", shares))
    return tuple(made)


def split_name(split: Split) -> str:
    return f"{split[0]}x{split[1]}"


def claims(samples: Samples) -> tuple[BenchmarkClaim, ...]:
    made = []
    for case in CASES:
        if case.num_tokens != LONG_TOKENS:
            continue
        medians = {
            (owner, reader): spread(each.slowest_s for each in taken).median
            for (each_case, owner, reader), taken in samples.items()
            if each_case == case
        }
        if not medians:
            continue
        owner, reader = max(medians, key=lambda pair: medians[pair])
        what = f"planning {case}, the slowest pair ({split_name(owner)} to {split_name(reader)})"
        made.append(BenchmarkClaim(what, medians[owner, reader], MAX_PLANNING_S, "us"))
    return tuple(made)


NOTES = (
    "TxP: tensor by pipeline. Descriptors are the total of all ranks of the reader.",
    "Planning is that of the reader's slowest rank, on one core; every rank plans for itself.",
    "Between blocks of equal size, slots after the last token are moved too if that saves descriptors.",
)
