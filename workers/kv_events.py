"""A worker's prefix cache events for routers: how prefixes are hashed, and which hashes were added and removed.

A hash stands for all tokens of a prompt up to a multiple of `HASH_BLOCK_SIZE`. It depends on the tokens and their
tenant, not on workers' block sizes or the process, so the hashes of one prompt find its prefixes on every worker. Pure.
"""

import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from msgspec import Struct, field
from xxhash import xxh3_64_intdigest

HASH_BLOCK_SIZE = 128  # tokens
KV_TIERS = ("device", "host", "disk", "remote")  # the fields of `KVEvents`
_HASH_BITS = 60  # two digits of a Python integer, which takes a third less memory than 64 bits do


class HashChanges(Struct, frozen=True, gc=False):
    """Prefix hashes added to one tier of a cache, and those removed."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class KVEvents(Struct, frozen=True, gc=False):
    """Changes of a cache after event `first`, up to event `last`: apply removals first, then additions.

    `whole`: discard all earlier hashes first. Additions up to event `reach` are included; if `reach` < `last`, read
    again for the others. Prefixes of multiples of `block_size` tokens have hashes.
    """

    first: int
    last: int
    reach: int
    block_size: int = field(name="grain")
    whole: bool = False
    device: HashChanges = HashChanges()
    host: HashChanges = HashChanges()
    disk: HashChanges = HashChanges()
    remote: HashChanges = HashChanges()


def prefix_hashes(
    tokens: Sequence[int],
    block_size: int = HASH_BLOCK_SIZE,
    known: Sequence[int] = (),
    salt: str = "",
    end: int | None = None,
) -> list[int]:
    """A hash for each full `block_size` of tokens: equal hashes mean equal tokens from position 0 on and an equal salt
    (`Request.cache_salt`), except for collisions.

    `known`: the first hashes, computed earlier. `end`: only of the first so many tokens. A collision costs a wrong
    routing estimate, never a wrong token. Nothing is hashed after a token that does not fit in 32 bits.
    """
    hashes = list(known)
    prefix_hash = hashes[-1] if hashes else xxh3_64_intdigest(salt.encode()) if salt else 0
    pack = _packer(block_size)
    try:
        for start in range(
            len(hashes) * block_size, (len(tokens) if end is None else end) - block_size + 1, block_size
        ):
            prefix_hash = xxh3_64_intdigest(pack(*tokens[start : start + block_size]), prefix_hash) >> (64 - _HASH_BITS)
            hashes.append(prefix_hash)
    except struct.error:
        pass
    return hashes


@lru_cache(maxsize=16)
def prefix_hashes_of_prompt(prompt: tuple[int, ...], salt: str) -> tuple[int, ...]:
    """`prefix_hashes`, kept for other workers in this process that get the same prompt."""
    return tuple(prefix_hashes(prompt, salt=salt))


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{block_size}I").pack


def prefix_hash_of_block(hashes: Sequence[int], index: int, block_size: int) -> int | None:
    """The hash of all tokens up to the end of this block; None: none ends there."""
    end = (index + 1) * block_size
    return None if end % HASH_BLOCK_SIZE else hashes[end // HASH_BLOCK_SIZE - 1]


def prefix_hashes_of_blocks(hashes: Sequence[int], first: int, stop: int, block_size: int) -> dict[int, int]:
    """`prefix_hash_of_block` of the blocks from `first` to before `stop` that have one, by their index."""
    found = {}
    for number in range(first * block_size // HASH_BLOCK_SIZE, min(len(hashes), stop * block_size // HASH_BLOCK_SIZE)):
        blocks, inside = divmod((number + 1) * HASH_BLOCK_SIZE, block_size)
        if not inside:
            found[blocks - 1] = hashes[number]
    return found
