"""The index: no reader's slot is reused, no block is found before it is written, and each slot is in one state."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.kv_store.slot_index import SlotIndex

NAMES = st.integers(0, 9).map(lambda number: bytes([number]))


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

    @rule(name=NAMES)
    def reserve(self, name: bytes) -> None:
        known = name in self.order or name in self.writing
        pinned = {slot for slot, _ in self.readers}
        victims = [each for each in self.order if self.index.slot_of(each) not in pinned]
        in_use = len(self.order) + len(self.writing) + len(set(self.erasing) | (pinned - self.slots_stored()))
        made = self.index.reserve(name)
        if known or (in_use == 4 and not victims):
            assert made is None
            return
        assert made is not None and made.gone == (victims[0] if in_use == 4 else None), "LRU, and only when full"
        assert made.slot not in pinned | set(self.writing.values()) | set(self.erasing)
        if made.gone is not None:
            self.order.remove(made.gone)
        self.content[made.slot] = None
        self.writing[name] = made.slot

    def slots_stored(self) -> set[int]:
        return {slot for name in self.order if (slot := self.index.slot_of(name)) is not None}

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.booleans())
    def written(self, data: st.DataObject, good: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(name)
        if good:
            self.index.publish(name)
            self.content[slot] = name
            self.order.append(name)
        else:
            assert self.index.abandon(name) == slot
            self.erasing.append(slot)

    @rule(name=NAMES)
    def pin(self, name: bytes) -> None:
        slot = self.index.pin(name)
        assert (slot is not None) == (name in self.order), "only what is written completely is found"
        if slot is not None:
            assert self.content[slot] == name
            self.readers.append((slot, name))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot, _ = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.index.unpin(slot)

    @rule(name=NAMES)
    def forget(self, name: bytes) -> None:
        slot = self.index.forget(name)
        assert (slot is not None) == (name in self.order)
        if slot is not None:
            self.order.remove(name)
            self.erasing.append(slot)

    @precondition(lambda self: self.erasing)
    @rule()
    def erased(self) -> None:
        self.index.unpin(self.erasing.pop(0))

    @rule(names=st.lists(NAMES, max_size=4, unique=True))
    def match(self, names: list[bytes]) -> None:
        count = self.index.match(names)
        assert all(name in self.order for name in names[:count])
        assert count == len(names) or names[count] not in self.order
        for name in reversed(names[:count]):
            self.order.remove(name)
            self.order.append(name)

    @invariant()
    def books_balance(self) -> None:
        self.index.check()
        assert list(self.index.names) == self.order

    @invariant()
    def readers_keep_their_blocks(self) -> None:
        assert all(self.content[slot] == name for slot, name in self.readers)


TestIndex = IndexMachine.TestCase


def test_what_a_file_holds_is_stored_oldest_first_and_the_newest_copy_counts() -> None:
    index = SlotIndex(5, [(b"a", 3), (b"b", 0), (b"a", 1)])
    index.check()
    assert (index.names, index.slot_of(b"a"), index.slot_of(b"b")) == ((b"b", b"a"), 1, 0)
    made = [index.reserve(name) for name in (b"c", b"d", b"e", b"f")]
    assert [each and each.gone for each in made] == [None, None, None, b"b"]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    index = SlotIndex(3, [(b"a", 0), (b"b", 1), (b"c", 2)])
    assert index.match([b"a", b"b", b"x"]) == 2
    assert index.names == (b"c", b"b", b"a")
