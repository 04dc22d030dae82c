"""Digests of cells: compares KV that the owner computed with KV that arrived, for any two shardings.

A cell is the KV of one block, head and layer: its K slots, then its V slots, without those that hold no token. Its
digest is xxh3 (64 bit), seeded by head and layer. The owner makes one for each cell on each rank; a piece of a block
has the sum of its cells' digests modulo 2**64, so one number is enough for any box of heads and layers.

xxh3 finds corruption and mix-ups, not attacks: the handshake authenticates peers. A pool on a device digests there, see
`Region.device_bytes`; the numbers are the same.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.errors import DigestMismatch, PeerRefused
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece, Progress
from kvtransfer.transport import Region, Span

MAX_DIGESTS = 1 << 20  # in one reply to a watch: 9 MiB of msgpack at most
MAX_PIECES = 4096  # that a reader may request


def digest_cells(region: Region, blocks: Iterable[tuple[int, int]]) -> tuple[bytes, ...]:
    """For each (block, slots that hold tokens) the digests of its cells, little-endian uint64 [kv_head, layer].

    Call it off the event loop for more than a few megabytes.
    """
    whole = Piece(0, region.layout.heads, region.layout.layers)
    cells = _digests(region, 0, region.layout, whole, [[(block, 0, slots)] for block, slots in blocks])
    return tuple(row.astype("<u8", copy=False).tobytes() for row in cells)


def host_digests(data: memoryview, layout: KVLayout, box: Piece, rows: Sequence[Sequence[Span]]) -> NDArray[np.uint64]:
    """[row, kv_head, layer]: the digests of the box's cells; `data` holds blocks of `layout`.

    A row has the slots of one cell: those of an owner's block, which may be in several of our blocks.
    """
    heads, layers = _places(box, layout)
    pool = _by_slots(data, layout)
    digest = xxhash.xxh3_64_intdigest
    digests: list[int] = []
    for spans in rows:
        parts = [pool[block, heads, layers, :, first : first + count] for block, first, count in spans]
        is_whole = len(parts) == 1 and spans[0][2] == layout.block_size
        slots = parts[0] if is_whole else np.concatenate(parts, axis=3)  # a whole cell is contiguous
        cells = slots.reshape(*slots.shape[:2], -1)
        digests += [
            digest(cell, head << 32 | layer)
            for head, row in enumerate(cells, box.heads[0])
            for layer, cell in enumerate(row, box.layers[0])
        ]
    return np.array(digests, np.uint64).reshape(len(rows), heads.stop - heads.start, layers.stop - layers.start)


def combine(cells: Sequence[bytes], layout: KVLayout, piece: Piece) -> tuple[int, ...]:
    """The digest of the piece in each block, from the digests of all its cells on a rank of `layout`.

    Raises `PeerRefused` when the rank does not hold the piece.
    """
    if not (_within(piece.heads, layout.heads) and _within(piece.layers, layout.layers)):
        raise PeerRefused(f"{piece} was requested, but that rank holds heads {layout.heads} of layers {layout.layers}")
    num_heads, num_layers, *_ = layout.shape
    grid = np.frombuffer(b"".join(cells), "<u8").reshape(len(cells), num_heads, num_layers)
    heads, layers = _places(piece, layout)
    return tuple(grid[:, heads, layers].sum(axis=(1, 2), dtype=np.uint64).tolist())


def watch_reply(
    cells: Sequence[Sequence[bytes]],
    layouts: Sequence[KVLayout],
    pieces: Sequence[Piece],
    first_block: int,
    ready_blocks: int,
    *,
    finished: bool,
    ttl_s: float,
) -> Progress:
    """The reply to a watch, for blocks first_block .. ready_blocks: cells[rank][block] combined (no ranks: no digests).

    Digests that don't fit one reply are left to the next. Raises `PeerRefused` when no rank holds one of the pieces.
    """
    if len(pieces) > MAX_PIECES or any(not 0 <= piece.shard < len(layouts) for piece in pieces):
        raise PeerRefused(f"digests of {len(pieces)} pieces were requested, some of which none of our ranks holds")
    most = MAX_DIGESTS // max(1, len(pieces))
    if cells and ready_blocks - first_block > most:
        ready_blocks, finished = first_block + most, False
        cells = [rank[:most] for rank in cells]
    digests = tuple(combine(cells[each.shard], layouts[each.shard], each) for each in pieces) if cells else ()
    return Progress(ready_blocks, first_block, digests, finished, ttl_s)


def verify_piece(
    region: Region,
    offset: int,
    layout: KVLayout,
    piece: Piece,
    spans: Iterable[Sequence[Span]],
    digests: Sequence[int],
    source_blocks: Sequence[int],
) -> None:
    """Compare a piece that arrived in blocks of `layout`, from `offset` of the region on, with the owner's digests.

    The i-th of `spans` has the slots of the owner's i-th block there. Raises `DigestMismatch`, naming the
    first block that differs.
    """
    rows = list(spans)
    arrived: list[int] = _digests(region, offset, layout, piece, rows).sum(axis=(1, 2), dtype=np.uint64).tolist()
    for places, found, wanted, source in zip(rows, arrived, digests, source_blocks, strict=True):
        if found != wanted:
            where = " and ".join(str(block) for block, _, _ in places)
            raise DigestMismatch(
                f"block {where} (the owner's block {source}, heads {piece.heads} of layers {piece.layers}) arrived "
                f"with digest {found:016x} instead of {wanted:016x}: drop the whole pull and compute the prompt again"
            )


def spans_of(
    source_size: int, target_size: int, target_blocks: Sequence[int], first_token: int, num_tokens: int
) -> Iterator[list[Span]]:
    """For each block of the owner from `first_token` on, the slots of its tokens in our blocks; see `PullOrder`."""
    end, first_block = first_token + num_tokens, first_token // target_size
    for start in range(first_token, end, source_size):
        token, stop = start, min(start + source_size, end)
        places: list[Span] = []
        while token < stop:
            block, slot = divmod(token, target_size)
            count = min(target_size - slot, stop - token)
            places.append((target_blocks[block - first_block], slot, count))
            token += count
        yield places


def _digests(
    region: Region, offset: int, layout: KVLayout, box: Piece, rows: Sequence[Sequence[Span]]
) -> NDArray[np.uint64]:
    """As `host_digests`, for blocks from `offset` of the region on, in host or device memory."""
    if region.device_bytes is not None:
        return region.device_bytes.digests(offset, layout, box, rows)
    num_blocks = (region.num_bytes - offset) // layout.block_bytes
    return host_digests(region.bytes(offset, num_blocks * layout.block_bytes), layout, box, rows)


def _by_slots(data: memoryview, layout: KVLayout) -> NDArray[np.uint8]:
    """The bytes of blocks as [block, kv_head, layer, k|v, slot, byte]."""
    heads, layers, vectors, slots, _ = layout.shape
    return np.frombuffer(data, np.uint8).reshape(-1, heads, layers, vectors, slots, layout.slot_bytes)


def _places(box: Piece, layout: KVLayout) -> tuple[slice, slice]:
    """The index ranges of absolute heads and layers in the blocks of one rank."""
    head, layer = layout.heads[0], layout.layers[0]
    return slice(box.heads[0] - head, box.heads[1] - head), slice(box.layers[0] - layer, box.layers[1] - layer)


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] < inner[1] <= outer[1]
