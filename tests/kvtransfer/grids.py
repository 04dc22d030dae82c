"""Ranks of sharded workers, and the movement of KV between them number by number: the reference of the copy plans."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer.layout import LATENT_ORDER, ORDER, KVLayout

Bytes = NDArray[np.uint8]
ORDERS = [ORDER, LATENT_ORDER]


def shards(whole: KVLayout, tensor: int, pipeline: int) -> tuple[KVLayout, ...]:
    """The layouts of a gang's ranks: layers by stage, KV heads by whole groups; replicated when there are too few."""
    layers, heads = whole.num_layers, whole.num_kv_heads
    made = []
    for rank in range(tensor * pipeline):
        stage, part = divmod(rank, tensor)
        head = part * heads // tensor
        last = (part + 1) * heads // tensor if tensor <= heads else head + 1
        rows = stage * layers // pipeline, (stage + 1) * layers // pipeline
        made.append(replace(whole, layers=rows, heads=(head, last)))
    return tuple(made)


def by_slots(pool: Bytes, layout: KVLayout) -> Bytes:
    """[block, kv_head, layer, k|v, slot, byte] of a pool's bytes."""
    return pool.reshape(-1, *layout.shape[:-1], layout.slot_bytes)


@dataclass(frozen=True)
class Case:
    """A transfer between two sharded workers whose KV has one dtype."""

    sources: tuple[KVLayout, ...]
    targets: tuple[KVLayout, ...]
    source_blocks: tuple[int, ...]  # from first_token on
    target_blocks: tuple[int, ...]
    first_token: int
    num_tokens: int
    pool_blocks: int

    def fill(self, rank: KVLayout, pool: Bytes, truth: Bytes) -> None:
        """Put the sequence's KV, truth [token, kv_head, layer, k|v, byte], where an owner's rank has it."""
        blocks = by_slots(pool, rank)
        for token in range(self.num_tokens):
            block, slot = divmod(token, rank.block_size)
            blocks[self.source_blocks[block], :, :, :, slot] = truth[token, slice(*rank.heads), slice(*rank.layers)]

    def arrived(self, rank: KVLayout, pool: Bytes) -> Bytes:
        """[token, kv_head, layer, k|v, byte]: what a reader's rank holds."""
        blocks, before = by_slots(pool, rank), self.first_token // rank.block_size
        places = (divmod(self.first_token + token, rank.block_size) for token in range(self.num_tokens))
        return np.stack([blocks[self.target_blocks[block - before], :, :, :, slot] for block, slot in places])

    def bystanders(self, rank: KVLayout) -> Bytes:
        """Slots [block, slot] of a reader's rank that no token of the transfer belongs to."""
        idle, before = np.ones((self.pool_blocks, rank.block_size), bool), self.first_token // rank.block_size
        for token in range(self.first_token, self.first_token + self.num_tokens):
            block, slot = divmod(token, rank.block_size)
            idle[self.target_blocks[block - before], slot] = False
        return idle


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...] = ("float32", "bfloat16", "fp8", "int8")) -> Case:
    """Any pair of gangs, odd shapes, any two block sizes, partial last blocks, prefixes that are here already."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dim, dtype, order = draw(st.integers(1, 5)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(ORDERS))
    sizes = draw(st.one_of(st.integers(1, 6).map(lambda size: (size, size)), st.tuples(*[st.integers(1, 6)] * 2)))
    owners, readers = (
        shards(
            KVLayout("m", layers, heads, dim, size, dtype, order=order),
            draw(st.integers(1, 6)),
            draw(st.integers(1, layers)),
        )
        for size in sizes
    )
    first = draw(st.integers(0, 3)) * sizes[0]
    count = draw(st.integers(1, 20))
    pool_blocks = 24
    given, taken = (
        draw(st.permutations(range(pool_blocks)) if draw(st.booleans()) else st.just(range(pool_blocks)))[
            : -(-(first + count) // size) - first // size
        ]
        for size in sizes
    )
    return Case(owners, readers, tuple(given), tuple(taken), first, count, pool_blocks)
