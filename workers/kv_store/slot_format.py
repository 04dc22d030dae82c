"""The format of a slot: a page with the header, then one block.

The header binds the block's hash to what the bytes mean (the fingerprint) and to a digest of the bytes, and has a
digest of its own. So a write that was torn at any place is recognized, and a slot of another model, layout, version or
format. xxh3 finds corruption, not attacks: the folder must be as private as the KV. Knows bytes, no file.
"""

import struct
from dataclasses import astuple
from hashlib import blake2b
from typing import NamedTuple

from xxhash import xxh3_128_digest

from kvtransfer.layout import KVLayout

FORMAT = 3  # change it with the meaning of a slot's bytes
PAGE_BYTES = 4096  # direct I/O needs this alignment
HASH_BYTES = 16
_MAGIC = b"diptych-"
_FIELDS = struct.Struct("<8sIQ32s16sQQ16s")
# magic, format, block bytes, fingerprint, block hash, prefix hash, number, digest of the block
_DIGEST_BYTES = 16
NO_PREFIX = (1 << 64) - 1
_TITLE = struct.Struct("<8sIQ32s")  # magic, format, block bytes, fingerprint: how page 0 begins


class SlabTitle(NamedTuple):
    """What the process that opened the file last wrote into page 0."""

    block_bytes: int
    fingerprint: bytes


class SlotHeader(NamedTuple):
    """`prefix`: the prefix hash that ends with the block, if it has one. `number` grows with every
    write into the file.
    """

    block_hash: bytes
    prefix: int | None
    number: int
    digest: bytes


def fingerprint(layout: KVLayout, *computed_by: str) -> bytes:
    """Equal where equal hashes mean equal bytes. `computed_by`: all else that the bits depend on, such as versions.

    `layout.model` covers the weights and the model's configuration, with its rope; the layout has dtype and shard.
    """
    return blake2b(repr((FORMAT, astuple(layout), computed_by)).encode(), digest_size=32).digest()


def slot_bytes(block_bytes: int) -> int:
    """Bytes of a slot on the disk: whole pages."""
    return PAGE_BYTES + -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def encode_title(fingerprint: bytes, block_bytes: int) -> bytes:
    fields = _TITLE.pack(_MAGIC, FORMAT, block_bytes, fingerprint)
    return fields + xxh3_128_digest(fields)


def decode_title(page: memoryview) -> SlabTitle | None:
    """None: page 0 of no file of this format."""
    fields = page[: _TITLE.size]
    magic, form, block_bytes, fingerprint = _TITLE.unpack(fields)
    if (magic, form) != (_MAGIC, FORMAT) or not _is_whole(page, _TITLE.size):
        return None
    return SlabTitle(block_bytes, fingerprint)


def _is_whole(page: memoryview, size: int) -> bool:
    """Whether the digest of the first `size` bytes comes after them."""
    return xxh3_128_digest(page[:size]) == page[size : size + _DIGEST_BYTES]


def is_header(page: memoryview) -> bool:
    """Whether a header was written completely here, by whom ever."""
    return page[: len(_MAGIC)] == _MAGIC and _is_whole(page, _FIELDS.size)


def encode_header(fingerprint: bytes, block_hash: bytes, prefix: int | None, number: int, block: memoryview) -> bytes:
    known = NO_PREFIX if prefix is None else prefix
    fields = _FIELDS.pack(_MAGIC, FORMAT, len(block), fingerprint, block_hash, known, number, xxh3_128_digest(block))
    return (fields + xxh3_128_digest(fields)).ljust(PAGE_BYTES, b"\0")


def decode_header(page: memoryview, fingerprint: bytes, block_bytes: int) -> SlotHeader | None:
    """None: no slot of this format, fingerprint and size was written completely here."""
    if not _is_whole(page, _FIELDS.size):
        return None
    magic, form, size, made_by, block_hash, prefix, number, digest = _FIELDS.unpack(page[: _FIELDS.size])
    if (magic, form, size, made_by) != (_MAGIC, FORMAT, block_bytes, fingerprint):
        return None
    return SlotHeader(block_hash, None if prefix == NO_PREFIX else prefix, number, digest)


def is_intact(header: SlotHeader, block: memoryview) -> bool:
    return xxh3_128_digest(block) == header.digest
