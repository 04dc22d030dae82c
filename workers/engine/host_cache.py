"""The prefix cache's second tier: blocks of host memory that keep what the device evicts.

    device  cached ──> evicted when its block is needed
              │ saved by the step that will overwrite the block, or by an earlier one
    host      └─> probation ──hit──> protected     restored for a prompt, when that is cheaper than recomputing
                    ^    └──> evicted    │
                    └────── the oldest ──┘

Blocks that were hit survive any number of blocks that are used once. Source of the two segments: Karedla, Love and
Wherry, Caching strategies to improve disk system performance (1994). Pinned blocks are in a third one, which nothing
evicts. Knows ids and content hashes; knows no memory and no clock.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from workers.engine.kv_event_log import KVEventLog, Tier
from workers.engine.pins import Pins

PROTECTED_SHARE = 0.2  # of the blocks; see decision 0060


class HostCache:
    """Owned by a BlockPool. Its block ids are below `num_blocks`. `prefix`: the prefix hash that ends with a block.

    At most `max_pinned` blocks are pinned. `unsaved`: pinned, on the device, and not here yet.
    """

    def __init__(self, num_blocks: int, log: KVEventLog, max_pinned: int = 0) -> None:
        self.num_blocks = num_blocks
        self._log = log
        self._free = dict.fromkeys(range(num_blocks))
        self._max_protected = int(num_blocks * PROTECTED_SHARE)
        self._probation: OrderedDict[bytes, int] = OrderedDict()  # block hash -> host block, oldest first
        self._protected: OrderedDict[bytes, int] = OrderedDict()  # the same, of those that were hit
        self._pinned: OrderedDict[bytes, int] = OrderedDict()  # the same, of those that are pinned
        self.pins = Pins(max_pinned)
        self.unsaved: dict[bytes, None] = {}
        self._prefixes: dict[bytes, int] = {}
        self._held: dict[int, int] = {}  # block -> steps and writes to stores that use it
        self._loading: dict[int, bytes | None] = {}  # block -> what arrives from a store; None: no longer wanted

    def __contains__(self, block_hash: bytes) -> bool:
        return self.block_of(block_hash) is not None

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected) + len(self._pinned)

    @property
    def num_pinned(self) -> int:
        """Pinned blocks that are here."""
        return len(self._pinned)

    def save(self, block_hash: bytes, prefix: int | None, busy: Collection[int]) -> int | None:
        """The host block to which the current step copies this content. None: all are busy or held.

        `busy` blocks are read by the same step, which saves before it reads.
        """
        assert block_hash not in self, "saved twice"
        block = self._take(busy)
        if block is not None:
            self._add(block_hash, block, prefix)
        return block

    def _take(self, busy: Collection[int] = ()) -> int | None:
        """A block that is neither free nor cached any more, and not in use; None: there is none."""
        block = next((block for block in self._free if self._is_idle(block, busy)), None)
        if block is None:
            cached = chain(self._probation.items(), self._protected.items())
            oldest, block = next(((known, block) for known, block in cached if self._is_idle(block, busy)), (b"", None))
            if block is None:
                return None
            self._drop(oldest)
        del self._free[block]
        return block

    def _is_idle(self, block: int, busy: Collection[int]) -> bool:
        return block not in busy and block not in self._held

    def _add(self, block_hash: bytes, block: int, prefix: int | None) -> None:
        (self._pinned if block_hash in self.pins else self._probation)[block_hash] = block
        self.unsaved.pop(block_hash, None)
        if prefix is not None:
            self._prefixes[block_hash] = prefix
            self._log.add(Tier.HOST, prefix)

    def pin(self, hashes: Sequence[bytes], ttl_s: float, now_s: float) -> None:
        """Keep these until `ttl_s` after their last use, from when they are here. `pins` has room for them."""
        self.pins.add(hashes, ttl_s, now_s)
        for block_hash in hashes:
            block = self._probation.pop(block_hash, self._protected.pop(block_hash, None))
            if block is not None:
                self._pinned[block_hash] = block

    def unpin(self, hashes: Iterable[bytes]) -> int:
        """Returns how many of these were pinned. What is here stays until it is evicted."""
        return self._release_pins(self.pins.remove(hashes))

    def expire_pins(self, now_s: float) -> None:
        self._release_pins(self.pins.expire(now_s))

    def _release_pins(self, hashes: Sequence[bytes]) -> int:
        for block_hash in reversed(hashes):  # so that tails are evicted first
            self.unsaved.pop(block_hash, None)
            if (block := self._pinned.pop(block_hash, None)) is not None:
                self._probation[block_hash] = block
        return len(hashes)

    def on_device(self, block_hash: bytes) -> None:
        """The device has this content, which a step can save if it is pinned."""
        if block_hash in self.pins and block_hash not in self:
            self.unsaved[block_hash] = None

    def block_of(self, block_hash: bytes) -> int | None:
        return self._probation.get(block_hash, self._protected.get(block_hash, self._pinned.get(block_hash)))

    def prefix_of(self, block_hash: bytes) -> int | None:
        return self._prefixes.get(block_hash)

    def hold(self, block: int) -> None:
        """Keep the block's memory as it is until `release`, for a step in flight or a write to a store."""
        self._held[block] = self._held.get(block, 0) + 1

    def release(self, block: int) -> None:
        self._held[block] -= 1
        if not self._held[block]:
            del self._held[block]

    def hold_free(self, count: int) -> list[int]:
        """Up to `count` free blocks, held; what is in them is evicted. Fewer if others are in use."""
        taken = [block for _ in range(count) if (block := self._take()) is not None]
        for block in taken:
            self._free[block] = None
            self.hold(block)
        return taken

    def load(self, block_hash: bytes) -> int | None:
        """A block into which a store may write this content until `loaded`. None: all are in use."""
        block = self._take()
        if block is not None:
            self._loading[block] = block_hash
        return block

    def loaded(self, block: int, prefix: int | None, *, arrived: bool) -> bool:
        """The store no longer writes into the block. If its content has `arrived` and is wanted, it is cached: True."""
        block_hash = self._loading.pop(block)
        is_wanted = arrived and block_hash is not None and block_hash not in self
        if is_wanted and block_hash is not None:
            self._add(block_hash, block, prefix)
        else:
            self._free[block] = None
        return is_wanted

    @property
    def loading(self) -> set[int]:
        """Blocks into which a store may write."""
        return set(self._loading)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The host blocks of the longest cached prefix of these, marked as hit so that tails are evicted first."""
        found = []
        for block_hash in hashes:
            block = self.block_of(block_hash)
            if block is None:
                break
            found.append(block)
        for block_hash, block in zip(reversed(hashes[: len(found)]), reversed(found), strict=True):
            if block_hash in self._pinned:
                continue
            self._probation.pop(block_hash, None)
            self._protected[block_hash] = block
            self._protected.move_to_end(block_hash)
        while len(self._protected) > self._max_protected:
            block_hash, block = self._protected.popitem(last=False)
            self._probation[block_hash] = block
        return found

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Drop these blocks, because their content is in doubt."""
        doubted = set(hashes)
        for block_hash in doubted:
            self._drop(block_hash)
        for block, expected in self._loading.items():
            if expected in doubted:
                self._loading[block] = None

    def _drop(self, block_hash: bytes) -> None:
        block = self.block_of(block_hash)
        if block is None:
            return
        for segment in (self._probation, self._protected, self._pinned):
            segment.pop(block_hash, None)
        self._free[block] = None
        prefix = self._prefixes.pop(block_hash, None)
        if prefix is not None:
            self._log.remove(Tier.HOST, prefix)

    def clear(self) -> None:
        self.forget([*self._probation, *self._protected, *self._pinned, *filter(None, self._loading.values())])

    def check(self) -> None:
        """Prove that each block is free, cached or loading, once, and that the log says so. Raises AssertionError."""
        segments = (self._probation, self._protected, self._pinned)
        ids = sorted([*self._free, *(block for each in segments for block in each.values()), *self._loading])
        assert ids == list(range(self.num_blocks)), "host cache blocks do not balance"
        assert len(self._protected) <= self._max_protected, "too much is protected"
        assert len(self.pins) <= self.pins.most and set(self._pinned) | set(self.unsaved) <= set(self.pins), (
            "pins differ"
        )
        assert not any(block_hash in self for block_hash in self.unsaved), "what is here would be saved again"
        assert all(block_hash in self for block_hash in self._prefixes), "a prefix outlived its content"
        assert self._log.hashes(Tier.HOST) == set(self._prefixes.values()), "the log differs from what is cached"
