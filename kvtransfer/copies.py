"""From block pairs to byte ranges: which bytes of the owner's pool go where in ours.

Pure arithmetic over two layouts. Knows no memory, no peer and no backend.
"""

from kvtransfer.errors import PeerRefused
from kvtransfer.layout import KVLayout
from kvtransfer.transport import Copy


def plan_copies(
    source_blocks: tuple[int, ...], target_blocks: tuple[int, ...], source: KVLayout, target: KVLayout
) -> tuple[Copy, ...]:
    """Copies that bring source_blocks[i] of the owner into target_blocks[i] of ours, sorted by target.

    Neighbours are merged where they touch on both sides in the same order, so ascending runs of blocks become one
    long range. Raises `PeerRefused` when the two pools hold different numbers, `ValueError` when the pairs make no
    sense (unequal lengths, a target named twice, a negative block).
    """
    refuse_unlike(source, target)
    if len(source_blocks) != len(target_blocks):
        raise ValueError(f"{len(source_blocks)} source blocks cannot fill {len(target_blocks)} target blocks")
    if len(set(target_blocks)) != len(target_blocks):
        raise ValueError("a target block is named twice: the later copy would overwrite the earlier one")
    if min(source_blocks, default=0) < 0 or min(target_blocks, default=0) < 0:
        raise ValueError("a block number is negative")
    size = target.block_bytes
    pairs = sorted(zip(target_blocks, source_blocks, strict=True))
    return merge(tuple(Copy(s * size, t * size, size) for t, s in pairs))


def merge(copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
    """Join each copy to its predecessor where both sides touch; the order stays."""
    merged: list[Copy] = []
    for copy in copies:
        last = merged[-1] if merged else None
        if last and (last.source + last.num_bytes, last.target + last.num_bytes) == (copy.source, copy.target):
            merged[-1] = Copy(last.source, last.target, last.num_bytes + copy.num_bytes)
        else:
            merged.append(copy)
    return tuple(merged)


def refuse_unlike(source: KVLayout, target: KVLayout) -> None:
    """Raise `PeerRefused` unless a block there and a block here hold the same numbers in the same places."""
    if source.fingerprint != target.fingerprint:
        raise PeerRefused(
            f"the owner's KV ({source.model}, {source.dtype}, {source.block_size}-token blocks, {source.fingerprint}) "
            f"is not ours ({target.model}, {target.dtype}, {target.block_size}-token blocks, {target.fingerprint}): "
            "serve the same weights with the same block size and dtype on both sides"
        )
    if (source.layers, source.heads) != (target.layers, target.heads):
        raise PeerRefused(
            f"the owner's rank holds layers {source.layers} and heads {source.heads}, ours holds layers "
            f"{target.layers} and heads {target.heads}: use equal tensor and pipeline parallelism on both sides"
        )


def refuse_outside(copies: tuple[Copy, ...], source_bytes: int, target_bytes: int) -> None:
    """Raise unless every range lies inside its pool: `PeerRefused` for the owner's side, `ValueError` for ours."""
    for copy in copies:
        if copy.num_bytes <= 0 or copy.source < 0 or copy.source + copy.num_bytes > source_bytes:
            raise PeerRefused(
                f"bytes {copy.source}..{copy.source + copy.num_bytes} lie outside the owner's {source_bytes}"
            )
        if copy.target < 0 or copy.target + copy.num_bytes > target_bytes:
            raise ValueError(f"bytes {copy.target}..{copy.target + copy.num_bytes} lie outside our {target_bytes}")
