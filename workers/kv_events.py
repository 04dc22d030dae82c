"""A worker's prefix cache events for routers: how prefixes are named, and which names were added and removed.

A name stands for all tokens of a prompt up to a multiple of `GRAIN`. It depends on the tokens and their tenant, not on
block sizes or the process, so the names of one prompt find its prefixes on every worker. Pure.
"""

import struct
from collections.abc import Callable, Sequence
from functools import cache

from msgspec import Struct
from xxhash import xxh3_64_intdigest

GRAIN = 128  # tokens
KV_TIERS = ("device", "host", "disk", "remote")  # the fields of `KVEvents`
_NAME_BITS = 60  # two digits of a Python integer, which takes a third less memory than 64 bits do


class NameChanges(Struct, frozen=True, gc=False):
    """Names added to one tier of a cache, and names removed."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class KVEvents(Struct, frozen=True, gc=False):
    """Changes of a cache after event `first`, up to event `last`: apply removals first, then additions.

    `whole`: discard all earlier names first. Additions up to event `reach` are included; if `reach` < `last`, read
    again for the others. Prefixes of multiples of `grain` tokens have names.
    """

    first: int
    last: int
    reach: int
    grain: int
    whole: bool = False
    device: NameChanges = NameChanges()
    host: NameChanges = NameChanges()
    disk: NameChanges = NameChanges()
    remote: NameChanges = NameChanges()


def chain(
    tokens: Sequence[int], grain: int = GRAIN, known: Sequence[int] = (), salt: str = "", end: int | None = None
) -> list[int]:
    """A name for each full `grain` of tokens: equal names mean equal tokens from position 0 on and an equal salt
    (`Request.cache_salt`), except for collisions.

    `known`: the first names, computed earlier. `end`: only of the first so many tokens. A collision costs a wrong
    routing estimate, never a wrong token. Nothing is named after a token that does not fit in 32 bits.
    """
    names = list(known)
    name = names[-1] if names else xxh3_64_intdigest(salt.encode()) if salt else 0
    pack = _packer(grain)
    try:
        for start in range(len(names) * grain, (len(tokens) if end is None else end) - grain + 1, grain):
            name = xxh3_64_intdigest(pack(*tokens[start : start + grain]), name) >> (64 - _NAME_BITS)
            names.append(name)
    except struct.error:
        pass
    return names


@cache
def _packer(grain: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{grain}I").pack


def name_of_block(names: Sequence[int], index: int, block_size: int) -> int | None:
    """The name in this chain of all tokens up to the end of this block; None: no name ends there."""
    end = (index + 1) * block_size
    return None if end % GRAIN else names[end // GRAIN - 1]


def ends_of_names(names: Sequence[int], first: int, stop: int, block_size: int) -> dict[int, int]:
    """`name_of_block` of the blocks from `first` to before `stop` that have one, by their index."""
    found = {}
    for number in range(first * block_size // GRAIN, min(len(names), stop * block_size // GRAIN)):
        blocks, inside = divmod((number + 1) * GRAIN, block_size)
        if not inside:
            found[blocks - 1] = names[number]
    return found
