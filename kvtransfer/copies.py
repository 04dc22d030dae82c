"""Maps blocks to byte ranges between ranks of an owner and a reader with any two shardings.

Pure arithmetic over layouts. Knows no memory, no peer and no backend.

A cell is the KV of one block, head and layer: its K slots, then its V slots. The cells of a block are ordered by head,
then by layer. So some heads with all layers are one range; with some of the layers they are one range for each head.
Where block sizes differ, K and V of each cell are copied separately, split at the block borders of both sides.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import PeerRefused
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Copies

Range = tuple[int, int]
Ints = NDArray[np.int64]


def pieces_of(sources: Sequence[KVLayout], target: KVLayout, rank: int) -> tuple[Piece, ...]:
    """The pieces that a reader's rank takes from the owner's ranks: disjoint, covering its KV, as few as possible.

    Among ranks with the same heads and layers, the reader's `rank` selects one, which spreads the load. Raises
    `PeerRefused` for KV of another model, or when no rank holds part of it.
    """
    owners: dict[tuple[Range, Range], list[int]] = {}
    for index, source in enumerate(sources):
        _refuse_unlike(source, target)
        box = _common(source.heads, target.heads), _common(source.layers, target.layers)
        if all(start < stop for start, stop in box):
            owners.setdefault(box, []).append(index)
    pieces: list[Piece] = []
    for (heads, layers), shards in sorted(owners.items(), key=lambda entry: -_area(*entry[0])):
        piece = Piece(shards[rank % len(shards)], heads, layers)
        if not any(_overlap(piece, taken) for taken in pieces):
            pieces.append(piece)
    if sum(piece.num_cells for piece in pieces) != _area(target.heads, target.layers):
        held = ", ".join(f"heads {each.heads} of layers {each.layers}" for each in sources) or "nothing"
        raise PeerRefused(
            f"our rank {rank} needs KV heads {target.heads} of layers {target.layers}, the owner's ranks hold {held}: "
            "not all of it can be read from them"
        )
    return tuple(sorted(pieces, key=lambda piece: (piece.layers, piece.heads)))


@lru_cache(maxsize=256)
def union_of_pieces(sources: tuple[KVLayout, ...], targets: tuple[tuple[KVLayout, int], ...]) -> tuple[Piece, ...]:
    """The pieces of all of a reader's ranks (layout, rank), each once; its leader requests their digests."""
    return tuple(dict.fromkeys(piece for target, rank in targets for piece in pieces_of(sources, target, rank)))


def plan_copies(
    piece: Piece,
    source: KVLayout,
    target: KVLayout,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    first_token: int,
    num_tokens: int,
) -> Copies:
    """Byte ranges that copy one piece of `num_tokens` tokens from the owner's pool into ours.

    Sorted by target; neighbors that touch on both sides are merged. Blocks as in `PullOrder`. Between equal block sizes
    whole blocks are copied, including the slots after the last token, which belong to the same sequence on both sides.
    Raises `ValueError` for an invalid order (blocks that do not match the tokens, a target named
    twice, a negative block, a first token within a block of the owner, unequal dtypes).
    """
    _refuse_invalid(source, target, source_blocks, target_blocks, first_token, num_tokens)
    if source.block_size == target.block_size and _box(source) == _box(target) == (piece.heads, piece.layers):
        return _whole_blocks(source_blocks, target_blocks) * source.block_bytes
    owner_blocks, our_blocks = np.array(source_blocks, np.int64), np.array(target_blocks, np.int64)
    order = np.arange(len(our_blocks)) if (our_blocks[1:] > our_blocks[:-1]).all() else np.argsort(our_blocks)
    if source.block_size == target.block_size:
        starts, lengths = _ranges(piece, source, target)
        ranges = np.empty((len(order), len(lengths), 3), np.int64)  # [our block, range, column]
        np.add(owner_blocks[order, None] * source.block_bytes, starts[:, 0], out=ranges[..., 0])
        np.add(our_blocks[order, None] * target.block_bytes, starts[:, 1], out=ranges[..., 1])
        ranges[..., 2] = lengths
        return ranges.reshape(-1, 3)
    return merge(_recut(piece, source, target, owner_blocks, our_blocks, order, first_token, num_tokens))


def _whole_blocks(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> Ints:
    """Runs of blocks that follow each other on both sides, by target: [run, (source, target, count)], in blocks."""
    runs: list[list[int]] = []
    shift = next_target = -1
    for ours, owners in sorted(zip(target_blocks, source_blocks, strict=True)):
        if ours == next_target and owners - ours == shift:
            runs[-1][2] += 1
        else:
            runs.append([owners, ours, 1])
            shift = owners - ours
        next_target = ours + 1
    return np.array(runs, np.int64).reshape(-1, 3)


def merge(copies: Copies) -> Copies:
    """Join each range to its predecessor where both sides touch; the order stays."""
    source, target, num_bytes = copies.T
    touches = source[:-1] + num_bytes[:-1] == source[1:]
    touches &= target[:-1] + num_bytes[:-1] == target[1:]
    if not touches.any():
        return copies
    firsts = np.flatnonzero(np.concatenate(([True], ~touches)))
    merged = copies.take(firsts, axis=0)
    merged[:, 2] = np.add.reduceat(num_bytes, firsts)
    return merged


def covering(block_size: int, first_token: int, num_tokens: int) -> Range:
    """The half-open range of a sequence's blocks that hold these tokens."""
    first = first_token // block_size
    return first, -(-(first_token + num_tokens) // block_size) if num_tokens else first


def refuse_outside(copies: Copies, source_bytes: int, target_bytes: int) -> None:
    """Raise unless every range is inside its pool: `PeerRefused` for the owner's side, `ValueError` for ours."""
    source, target, num_bytes = copies.T
    if np.count_nonzero(bad := (num_bytes <= 0) | (source < 0) | (source + num_bytes > source_bytes)):
        start, _, length = copies[bad.argmax()].tolist()
        raise PeerRefused(f"bytes {start}..{start + length} are outside the owner's {source_bytes}")
    if np.count_nonzero(bad := (target < 0) | (target + num_bytes > target_bytes)):
        _, start, length = copies[bad.argmax()].tolist()
        raise ValueError(f"bytes {start}..{start + length} are outside our {target_bytes}")


def _ranges(piece: Piece, source: KVLayout, target: KVLayout) -> tuple[Ints, Ints]:
    """Between blocks of equal size: (starts [range, (in source, in target)], lengths [range]) within one block."""
    cell_bytes, heads = source.cell_bytes, np.arange(*piece.heads)
    starts = np.stack([_cell_offsets(layout, heads, piece.layers[0], cell_bytes) for layout in (source, target)], -1)
    length = (piece.layers[1] - piece.layers[0]) * cell_bytes
    if source.layers == target.layers == piece.layers:
        return starts[:1], np.array([len(heads) * length])
    return starts, np.full(len(heads), length)


def _recut(
    piece: Piece,
    source: KVLayout,
    target: KVLayout,
    owner_blocks: Ints,
    our_blocks: Ints,
    order: Ints,
    first_token: int,
    num_tokens: int,
) -> Copies:
    """Between blocks of unequal sizes: for each of our blocks, each cell, K and V, a range from each owner's block."""
    # Tokens of our blocks, in the order of their addresses: from ... to, counted in the sequence.
    begin = (first_token // target.block_size + order) * target.block_size
    starts = np.maximum(begin, first_token)[:, None]  # [our block, 1]
    stops = np.minimum(begin + target.block_size, first_token + num_tokens)[:, None]
    most = math.ceil((target.block_size - 1) / source.block_size) + 1
    if target.block_size % source.block_size == 0 or source.block_size % target.block_size == 0:
        most = max(1, target.block_size // source.block_size)
    index = starts // source.block_size + np.arange(most)  # of the owner's block in the sequence [our block, part]
    starts = np.maximum(starts, index * source.block_size)
    lengths = np.maximum(np.minimum(stops, (index + 1) * source.block_size) - starts, 0)
    index = np.minimum(
        index - first_token // source.block_size, len(owner_blocks) - 1
    )  # parts of length 0 are dropped below
    owner_starts = owner_blocks[index] * source.block_bytes + starts % source.block_size * source.slot_bytes
    our_starts = our_blocks[order, None] * target.block_bytes + starts % target.block_size * target.slot_bytes
    heads, layers = np.arange(*piece.heads)[:, None, None], np.arange(*piece.layers)[:, None]
    halves = [
        (_cell_offsets(layout, heads, layers, layout.vectors * half) + np.arange(layout.vectors) * half).reshape(-1)
        for layout in (source, target)
        for half in (layout.block_size * layout.slot_bytes,)
    ]
    plan = np.empty((len(order), len(halves[0]), most, 3), np.int64)  # [our block, half of a cell, part, column]
    np.add(owner_starts[:, None], halves[0][:, None], out=plan[..., 0])
    np.add(our_starts[:, None], halves[1][:, None], out=plan[..., 1])
    plan[..., 2] = (lengths * source.slot_bytes)[:, None]
    if lengths.all():
        return plan.reshape(-1, 3)
    real = np.flatnonzero(np.broadcast_to(lengths[:, None] > 0, plan.shape[:-1]))
    return plan.reshape(-1, 3).take(real, axis=0)


def _cell_offsets(layout: KVLayout, heads: Ints, layers: Ints | int, cell_bytes: int) -> Ints:
    """Where the cells of absolute heads and layers begin within a block."""
    num_layers = layout.layers[1] - layout.layers[0]
    return ((heads - layout.heads[0]) * num_layers + layers - layout.layers[0]) * cell_bytes


def _refuse_unlike(source: KVLayout, target: KVLayout) -> None:
    if source.content != target.content:
        if source.model == target.model and source.state_layers and target.state_layers:
            raise PeerRefused(
                f"the owner's blocks have {source.block_size} tokens in {source.dtype}, ours {target.block_size} in "
                f"{target.dtype}: blocks with the state of linear attention need the same engine.block_size and "
                "engine.dtype on both sides"
            )
        raise PeerRefused(
            f"the owner's KV ({source.model}, {source.num_layers} layers, {source.num_kv_heads} heads of "
            f"{source.head_dim}, {source.fingerprint}) is not ours ({target.model}, {target.num_layers} layers, "
            f"{target.num_kv_heads} heads of {target.head_dim}, {target.fingerprint}): serve the same weights on both "
            "sides"
        )


def _refuse_invalid(
    source: KVLayout,
    target: KVLayout,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    first_token: int,
    num_tokens: int,
) -> None:
    if source.dtype != target.dtype:
        raise ValueError(f"{source.dtype} does not become {target.dtype} by copying")
    if first_token % source.block_size or first_token < 0 or num_tokens < 0:
        raise ValueError(f"token {first_token} begins no block of the owner, which have {source.block_size} tokens")
    for whose, layout, blocks in (("source", source, source_blocks), ("target", target, target_blocks)):
        first, stop = covering(layout.block_size, first_token, num_tokens)
        if len(blocks) != stop - first:
            raise ValueError(f"{len(blocks)} {whose} blocks do not hold tokens {first_token} + {num_tokens}")
        if min(blocks, default=0) < 0:
            raise ValueError(f"a {whose} block number is negative")
    if len(set(target_blocks)) != len(target_blocks):
        raise ValueError("a target block is named twice: the later copy would overwrite the earlier one")


def _box(layout: KVLayout) -> tuple[Range, Range]:
    return layout.heads, layout.layers


def _area(heads: Range, layers: Range) -> int:
    return (heads[1] - heads[0]) * (layers[1] - layers[0])


def _common(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])


def _overlap(one: Piece, other: Piece) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in ((one.heads, other.heads), (one.layers, other.layers)))
