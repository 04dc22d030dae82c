"""The pool of KV blocks: reference counts, and the prefix cache.

    free ──allocate──> held (references > 0) ──free, last reference──> free, or cached when it has a block hash
      ^                                                                  │
      └────────────────────── evicted, oldest first ─────────────────────┘

Several owners may hold one block: sequences that share a prefix, a lease for a reader, a transfer that may still write
into it. A block is free once all of them release it. Knows ids and counts; knows no memory and no clock.
"""

import heapq
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from workers.engine.block_list import BlockList, block_ids
from workers.engine.cache_hits import CacheHits
from workers.engine.host_cache import HostCache
from workers.engine.kv_event_log import KVEventLog, Tier
from workers.engine.step import ELSEWHERE
from workers.errors import InvalidRequest, Overloaded


class OutOfBlocks(Exception):
    """Fewer free blocks than asked for."""


def _root(salt: str) -> bytes:
    """The parent hash of the first block."""
    return blake2b(salt.encode(), digest_size=16, person=b"salt").digest() if salt else b""


def tail_hash(tokens: Sequence[int], block_size: int, full: Sequence[bytes], salt: str = "") -> bytes:
    """The hash of the last block, full or not; `full` are the hashes of the full blocks, of the same salt."""
    num_full = len(tokens) // block_size
    rest = tokens[num_full * block_size :]
    if not rest:
        return full[num_full - 1]
    parent = full[num_full - 1] if num_full else _root(salt)
    return blake2b(parent + struct.pack(f"<{len(rest)}I", *rest), digest_size=16, person=b"tail").digest()


def block_hashes(
    tokens: Sequence[int], block_size: int, known: Sequence[bytes] = (), salt: str = "", end: int | None = None
) -> list[bytes]:
    """A hash for each full block: equal hashes mean equal tokens from position 0 on, and an equal salt.

    `known` are the hashes of the first blocks, computed earlier. `salt` separates tenants (`Request.cache_salt`).
    `end`: only of the first so many tokens.
    """
    hashes = list(known)
    extend_hashes(hashes, tokens, block_size, salt, len(tokens) if end is None else end)
    return hashes


@lru_cache(maxsize=16)
def hashes_of_prompt(prompt: tuple[int, ...], block_size: int, salt: str) -> tuple[bytes, ...]:
    """`block_hashes`, kept for other workers in this process that get the same prompt."""
    return tuple(block_hashes(prompt, block_size, salt=salt))


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str, end: int) -> None:
    """Add those of `block_hashes` that are missing."""
    block_hash = hashes[-1] if hashes else _root(salt)
    fresh = tokens[len(hashes) * block_size : end // block_size * block_size]
    content, stride = struct.pack(f"<{len(fresh)}I", *fresh), 4 * block_size
    for start in range(0, len(content), stride):
        block_hash = blake2b(block_hash + content[start : start + stride], digest_size=16).digest()
        hashes.append(block_hash)


class Cached(NamedTuple):
    """A cached block, its block hash, and the prefix hash that ends with it."""

    block: int
    block_hash: bytes
    prefix: int | None


class BlockPool:
    """Owned by one Engine. The first `reserved` block ids belong to preflight and are never handed out.

    `block_bytes`: of a block's KV. `host_blocks` of host memory keep the content of evicted blocks, and of up to
    `max_pinned` pinned ones.
    `has_state`: a block also has a state, which is that after its last computed token; so a sequence can go on behind
    all tokens of a block, but not behind some of them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        block_bytes: int = 0,
        reserved: int = 0,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        max_pinned: int = 0,
        has_state: bool = False,
    ) -> None:
        if num_blocks <= reserved:
            raise ValueError(f"a pool of {num_blocks} blocks has none left beside its {reserved} reserved ones")
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.has_state = has_state
        self.num_blocks = num_blocks - reserved
        self._first = reserved
        self._prefix_caching = prefix_caching
        self._references = [0] * reserved  # of each block ever allocated, so an unused pool costs nothing
        self._end = num_blocks
        self._clean: list[int] = []  # heap of freed blocks: lowest ids first, so that runs are adjacent
        self._cached = BlockList(reserved)  # unreferenced but reusable, oldest first
        self._block_hashes: list[bytes | None] = [None] * reserved  # of each block, referenced or not
        self._blocks: dict[bytes, int] = {}  # block hash -> block
        self._prefixes: dict[int, int] = {}  # block -> the prefix hash that ends there
        self.digests: dict[int, tuple[bytes, ...]] = {}  # block -> digests of its cells on each rank
        self._transfers: list[tuple[int, ...]] = []  # which reads may still write to
        self._fetched: set[int] = set()  # cached blocks from another worker that no prompt has used yet
        self.hits = CacheHits()
        self.log = KVEventLog(block_size)
        self.host = HostCache(host_blocks, self.log, max_pinned)
        self.forget_in_stores: Callable[[Sequence[bytes]], object] = len  # set by an Engine with stores

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    @property
    def num_free(self) -> int:
        return len(self._clean) + self._cached.length + self._end - len(self._references)

    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return self._cached.length

    def use_fetched(self, blocks: Sequence[int]) -> int:
        """How many of these came from another worker, and are used for the first time."""
        first = self._fetched.intersection(blocks)
        self._fetched -= first
        return len(first)

    def allocate(self, count: int, evicted: list[Cached] | None = None) -> list[int]:
        """As `take`, in ascending order."""
        return sorted(self.take(count, evicted))

    def take(self, count: int, evicted: list[Cached] | None = None) -> list[int]:
        """`count` blocks with one reference each. Raises `OutOfBlocks` and changes nothing.

        Evicted prefixes are added to `evicted`, for a pool with host memory; their content stays in the blocks until
        the next write.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        taken = [heapq.heappop(self._clean) for _ in range(min(count, len(self._clean)))]
        first = len(self._references)  # every freed id is lower
        untouched = range(first, min(first + count - len(taken), self._end))
        if untouched:
            self._references += [0] * len(untouched)
            self._block_hashes += [None] * len(untouched)
            self._cached.grow(len(untouched))
            taken += block_ids(untouched.start, untouched.stop)
        if len(taken) < count:
            oldest = self._cached.popleft(count - len(taken))
            if evicted is not None and self.host.num_blocks:
                evicted += map(self._as_cached, oldest)
            self._forget(oldest)
            taken += oldest
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are held."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is shared but not held"
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference. The tail is freed first, so that the head of an idle prefix survives longest."""
        references, hashes, idle = self._references, self._block_hashes, []
        for block in reversed(blocks):
            if block == ELSEWHERE:
                continue
            left = references[block] = references[block] - 1
            assert left >= 0, f"block {block} is freed twice"
            if left:
                continue
            if hashes[block] is not None:
                idle.append(block)
            else:
                heapq.heappush(self._clean, block)
        self._cached.extend(idle)

    def begin_transfer(self, blocks: tuple[int, ...]) -> None:
        """A read may write to these blocks until `end_transfer`, so they stay held until then."""
        self.share(blocks)
        self._transfers.append(blocks)

    def end_transfer(self, blocks: tuple[int, ...]) -> None:
        self._transfers.remove(blocks)
        self.free(blocks)

    @property
    def num_quarantined(self) -> int:
        """Blocks that reads may still write to."""
        return len(set().union(*self._transfers))

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, with one more reference each."""
        found = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            self._cached.discard(block)
            self._references[block] += 1
            found.append(block)
        return found

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Length of the longest known prefix, in blocks."""
        return next((place for place, block_hash in enumerate(hashes) if block_hash not in self._blocks), len(hashes))

    def num_kept(self, hashes: Sequence[bytes]) -> int:
        """Length of the longest known prefix and of what goes on in host memory, in blocks."""
        here = self.num_known(hashes)
        behind = (place for place in range(here, len(hashes)) if hashes[place] not in self.host)
        return next(behind, len(hashes))

    def cache_block(self, block: int, content: bytes, prefix: int | None = None, *, fetched: bool = False) -> None:
        """As `cache_blocks`, of one block. `prefix`: as in `prefixes`. `fetched`: another worker has computed it."""
        is_new = self._prefix_caching and content not in self._blocks
        self.cache_blocks((block,), (content,), {} if prefix is None else {block: prefix})
        if fetched and is_new:
            self._fetched.add(block)

    def cache_blocks(self, blocks: Sequence[int], contents: Sequence[bytes], prefixes: Mapping[int, int]) -> None:
        """Held blocks are computed and have these hashes. The first block with a hash keeps it.

        A tail block that has been filled since gets its new hash instead. `prefixes`: by block, the prefix hash that
        ends with it, for those that have one.
        """
        if not self._prefix_caching:
            return
        known, hashes, has_pins = self._blocks, self._block_hashes, self.host.pins.most > 0
        assert all(map(self._references.__getitem__, blocks)), f"one of the blocks {blocks} is cached but not held"
        if not has_pins and known.keys().isdisjoint(contents) and not any(map(hashes.__getitem__, blocks)):  # usual
            known.update(zip(contents, blocks, strict=True))
            for block, content in zip(blocks, contents, strict=True):
                hashes[block] = content
            self._prefixes.update(prefixes)
            for prefix in prefixes.values():
                self.log.add(Tier.DEVICE, prefix)
            return
        for block, content in zip(blocks, contents, strict=True):
            if known.setdefault(content, block) != block or hashes[block] == content:
                continue
            if hashes[block] is not None:
                self._forget((block,))
            hashes[block] = content
            if has_pins:
                self.host.on_device(content)
            if block in prefixes:
                self._prefixes[block] = prefixes[block]
                self.log.add(Tier.DEVICE, prefixes[block])

    def hold_oldest(self, most: int, among: int) -> list[Cached]:
        """Up to `most` of the next `among` cached blocks to be evicted, those whose content is not on the host.

        The caller holds a reference to each, to be dropped by `free_oldest`. Empty while no eviction is near.
        """
        if len(self._clean) + self._end - len(self._references) >= among:
            return []
        oldest = map(self._as_cached, islice(self._cached, among))
        going = [each for each in oldest if each.block_hash not in self.host][:most]
        for block, _, _ in going:
            self._cached.discard(block)
            self._references[block] = 1
        return going

    def _as_cached(self, block: int) -> Cached:
        block_hash = self._block_hashes[block]
        assert block_hash is not None, f"block {block} is cached without a hash"
        return Cached(block, block_hash, self._prefixes.get(block))

    def hold_unsaved(self, most: int) -> list[Cached]:
        """Up to `most` pinned blocks that are here and not in host memory, with one more reference each."""
        held = []
        for block_hash in [*islice(self.host.unsaved, most)]:
            del self.host.unsaved[block_hash]  # again when it is cached again
            for block in self.match([block_hash]):
                held.append(Cached(block, block_hash, self._prefixes.get(block)))
        return held

    def pin(self, hashes: Sequence[bytes], ttl_s: float, now_s: float) -> None:
        """As `HostCache.pin`, and save what the device has.

        Raises `InvalidRequest` where nothing may be pinned, `Overloaded` beside too many other pins.
        """
        pins = self.host.pins
        if not pins.most:
            raise InvalidRequest("pin", "nothing can be pinned here; give the pool cache: {host: 8GiB, pins: 1GiB}")
        if missing := pins.num_missing(hashes):
            room = f"{len(pins)} of at most {pins.most} blocks are pinned already"
            raise Overloaded(f"the prompt needs {missing} blocks more than may be pinned: {room}", retry_after_s=1.0)
        self.host.pin(hashes, ttl_s, now_s)
        for block_hash in hashes:
            if block_hash in self._blocks:
                self.host.on_device(block_hash)

    def free_oldest(self, blocks: Sequence[int]) -> None:
        """Drop a reference: blocks without another one are cached again, and evicted next in this order."""
        for block in reversed(blocks):
            self.free([block])
            if block in self._cached:
                self._cached.discard(block)
                self._cached.appendleft(block)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove these hashes from all tiers, because their content is in doubt; owners keep the blocks."""
        self.host.forget(hashes)
        self.forget_in_stores(hashes)
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            self._forget((block,))
            if self._cached.discard(block):
                heapq.heappush(self._clean, block)

    def is_shared(self, block: int, owners: int = 1) -> bool:
        """Whether more than `owners` hold the block, so that none of them may write into it."""
        return self._references[block] > owners

    def has_hash(self, block: int) -> bool:
        return self._block_hashes[block] is not None

    def clear_cache(self) -> None:
        """Evict every unreferenced prefix, also on the host."""
        self.host.clear()
        oldest = self._cached.popleft(len(self._cached))
        self._forget(oldest)
        for block in oldest:
            heapq.heappush(self._clean, block)

    def _forget(self, blocks: Sequence[int]) -> None:
        hashes, known, digests, fetched = self._block_hashes, self._blocks, self.digests, self._fetched
        for block in blocks:
            block_hash, hashes[block] = hashes[block], None
            assert block_hash is not None, f"block {block} has no hash"
            del known[block_hash]
            if digests:
                digests.pop(block, None)
            if fetched:
                fetched.discard(block)
            if block in self._prefixes:
                self.log.remove(Tier.DEVICE, self._prefixes.pop(block))

    def check(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Prove the invariants; `held` are the block lists of every other owner. Raises AssertionError."""
        expected = [0] * len(self._references)
        for blocks in (*held, *self._transfers):
            for block in blocks:
                if block != ELSEWHERE:
                    expected[block] += 1
        assert expected == self._references, "references differ from what the owners hold"
        assert len(expected) <= self._end, "more blocks were taken than there are"
        free = sorted([*self._clean, *self._cached])
        assert free == [b for b in range(self._first, len(expected)) if not expected[b]], "free list differs"
        hashes = self._block_hashes
        assert len(hashes) - hashes.count(None) == len(self._blocks), "a block and its hash differ in number"
        assert [hashes[block] for block in self._blocks.values()] == [*self._blocks], "a block has another hash"
        assert all(hashes[block] is not None for block in self.digests), "a digest outlived its block's hash"
        self.host.check()
        assert all(hashes[block] is not None for block in self._prefixes), "a prefix outlived its block's hash"
        assert self.log.hashes(Tier.DEVICE) == set(self._prefixes.values()), "the log differs from what is cached"
