"""Digests of blocks: what the owner computed and what arrived can be compared without moving them again.

xxh3 (64 bit) finds damage and mix-ups, not malice: authenticity is the handshake's business. The hash runs without
the GIL, so a worker thread can check one chunk while the next one is on the wire. Host memory only.
"""

from collections.abc import Sequence

import xxhash

from kvtransfer.errors import DigestMismatch
from kvtransfer.transport import Region


def digest_bytes(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def digest_blocks(region: Region, blocks: Sequence[int]) -> tuple[int, ...]:
    """One digest for each of `blocks`, in their order. Call it off the event loop for more than a few megabytes."""
    size = region.layout.block_bytes
    return tuple(digest_bytes(region.bytes(block * size, size)) for block in blocks)


def verify_blocks(region: Region, blocks: Sequence[int], digests: Sequence[int], source_blocks: Sequence[int]) -> None:
    """Raise `DigestMismatch`, naming the first block whose bytes differ from the owner's digest."""
    for block, wanted, source in zip(blocks, digests, source_blocks, strict=True):
        (found,) = digest_blocks(region, (block,))
        if found != wanted:
            raise DigestMismatch(
                f"block {block} (the owner's block {source}) arrived with digest {found:016x} instead of "
                f"{wanted:016x}: drop the whole pull and compute the prompt again"
            )
