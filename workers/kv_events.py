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
_NAME_BITS = 60  # two digits of a Python integer, which takes a third less memory than 64 bits do


class NameChanges(Struct, frozen=True, gc=False):
    """Names that came to one tier of a cache, and those that went."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class KVEvents(Struct, frozen=True, gc=False):
    """How a cache changed behind event `first`, up to event `last`: take the removed names away, then add the others.

    `whole`: forget what was known before, this starts over. Names that came by events up to `reach` are included;
    where that is not `last` yet, there are more to ask for. Prefixes of multiples of `grain` tokens have names here.
    """

    first: int
    last: int
    reach: int
    grain: int
    whole: bool = False
    device: NameChanges = NameChanges()
    host: NameChanges = NameChanges()


def chain(tokens: Sequence[int], grain: int = GRAIN, known: Sequence[int] = (), salt: str = "") -> list[int]:
    """A name for each full `grain` of tokens: equal names mean, but for a collision, equal tokens from position 0 on,
    and an equal salt (`Request.cache_salt`).

    `known` are the names of the first ones, as computed before. A collision costs a wrong guess about a cache, never a
    wrong token. Behind a token that no worker would take, nothing is named.
    """
    names = list(known)
    name = names[-1] if names else xxh3_64_intdigest(salt.encode()) if salt else 0
    pack = _packer(grain)
    try:
        for start in range(len(names) * grain, len(tokens) - grain + 1, grain):
            name = xxh3_64_intdigest(pack(*tokens[start : start + grain]), name) >> (64 - _NAME_BITS)
            names.append(name)
    except struct.error:
        pass
    return names


@cache
def _packer(grain: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{grain}I").pack


def name_of_block(names: Sequence[int], index: int, block_size: int) -> int | None:
    """The name, of this chain, of all tokens up to the end of this block; None: none ends there."""
    end = (index + 1) * block_size
    return None if end % GRAIN else names[end // GRAIN - 1]
