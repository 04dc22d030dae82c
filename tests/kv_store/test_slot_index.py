"""The index: no reader's slot is reused, no block is found before it is written, and each slot is in one state."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.kv_store.slot_index import SlotIndex

HASHES = st.integers(0, 9).map(lambda number: bytes([number]))


class IndexMachine(RuleBasedStateMachine):
    """A model of the file: what each slot holds, or None while it is written or erased."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SlotIndex(4)
        self.content: dict[int, bytes | None] = {}
        self.order: list[bytes] = []  # stored, least recently used first
        self.writing: dict[bytes, int] = {}
        self.readers: list[tuple[int, bytes]] = []  # slot, and the block it must keep
        self.erasing: list[int] = []

    @rule(block_hash=HASHES)
    def reserve(self, block_hash: bytes) -> None:
        known = block_hash in self.order or block_hash in self.writing
        pinned = {slot for slot, _ in self.readers}
        victims = [each for each in self.order if self.index.slot_of(each) not in pinned]
        in_use = len(self.order) + len(self.writing) + len(set(self.erasing) | (pinned - self.slots_stored()))
        made = self.index.reserve(block_hash)
        if known or (in_use == 4 and not victims):
            assert made is None
            return
        assert made is not None and made.gone == (victims[0] if in_use == 4 else None), "LRU, and only when full"
        assert made.slot not in pinned | set(self.writing.values()) | set(self.erasing)
        if made.gone is not None:
            self.order.remove(made.gone)
        self.content[made.slot] = None
        self.writing[block_hash] = made.slot

    def slots_stored(self) -> set[int]:
        return {slot for block_hash in self.order if (slot := self.index.slot_of(block_hash)) is not None}

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.booleans())
    def written(self, data: st.DataObject, good: bool) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(block_hash)
        if good:
            self.index.publish(block_hash)
            self.content[slot] = block_hash
            self.order.append(block_hash)
        else:
            assert self.index.abandon(block_hash) == slot
            self.erasing.append(slot)

    @rule(block_hash=HASHES)
    def pin(self, block_hash: bytes) -> None:
        slot = self.index.pin(block_hash)
        assert (slot is not None) == (block_hash in self.order), "only what is written completely is found"
        if slot is not None:
            assert self.content[slot] == block_hash
            self.readers.append((slot, block_hash))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot, _ = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.index.unpin(slot)

    @rule(block_hash=HASHES)
    def forget(self, block_hash: bytes) -> None:
        slot = self.index.forget(block_hash)
        assert (slot is not None) == (block_hash in self.order)
        if slot is not None:
            self.order.remove(block_hash)
            self.erasing.append(slot)

    @precondition(lambda self: self.erasing)
    @rule()
    def erased(self) -> None:
        self.index.unpin(self.erasing.pop(0))

    @rule(hashes=st.lists(HASHES, max_size=4, unique=True))
    def match(self, hashes: list[bytes]) -> None:
        count = self.index.match(hashes)
        assert all(block_hash in self.order for block_hash in hashes[:count])
        assert count == len(hashes) or hashes[count] not in self.order
        for block_hash in reversed(hashes[:count]):
            self.order.remove(block_hash)
            self.order.append(block_hash)

    @invariant()
    def books_balance(self) -> None:
        self.index.check()
        assert list(self.index.block_hashes) == self.order

    @invariant()
    def readers_keep_their_blocks(self) -> None:
        assert all(self.content[slot] == block_hash for slot, block_hash in self.readers)


TestIndex = IndexMachine.TestCase


def test_what_a_file_holds_is_stored_oldest_first_and_the_newest_copy_counts() -> None:
    index = SlotIndex(5, [(b"a", 3), (b"b", 0), (b"a", 1)])
    index.check()
    assert (index.block_hashes, index.slot_of(b"a"), index.slot_of(b"b")) == ((b"b", b"a"), 1, 0)
    made = [index.reserve(block_hash) for block_hash in (b"c", b"d", b"e", b"f")]
    assert [each and each.gone for each in made] == [None, None, None, b"b"]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    index = SlotIndex(3, [(b"a", 0), (b"b", 1), (b"c", 2)])
    assert index.match([b"a", b"b", b"x"]) == 2
    assert index.block_hashes == (b"c", b"b", b"a")
