"""The index beside a slab: a reader knows what its owner told last, however much it missed. Damage is no error."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv_store.slabs import FINGERPRINT, hash_of
from workers.kv_store import shared_index
from workers.kv_store.shared_index import SharedIndex, SharedIndexReader, SlotContent, index_bytes
from workers.kv_store.slot_format import PAGE_BYTES

SLOTS = 6


@pytest.fixture(autouse=True)
def short_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_index, "RING", 8)
    monkeypatch.setattr(shared_index, "_TABLE", PAGE_BYTES + 8 * shared_index.RECORD_BYTES)


def take(reader: SharedIndexReader, known: dict[int, tuple[bytes, int | None]]) -> None:
    """Apply what the reader tells; each old hash must be the known one."""
    for (slot, block_hash, prefix), old in reader.changes():
        was = known.pop(slot, None)
        assert old == (was and was[0])
        if block_hash is not None:
            known[slot] = (block_hash, prefix)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.none() | st.integers(0, 5), st.booleans()), max_size=40),
    st.integers(0, 40),
)
def test_a_reader_that_looks_now_and_then_knows_the_last_content_of_each_slot(
    changes: list[tuple[int, int | None, bool]], reopened_at: int
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        expected: dict[int, tuple[bytes, int | None]] = {2: (hash_of(2), None)}
        owner = SharedIndex(path, FINGERPRINT, SLOTS, [SlotContent(2, hash_of(2))])
        reader, known = SharedIndexReader(path, FINGERPRINT), dict[int, tuple[bytes, int | None]]()
        for number, (slot, content, looks) in enumerate(changes):
            if number == reopened_at:
                owner.close()
                there = [SlotContent(slot, *each) for slot, each in expected.items()]
                owner = SharedIndex(path, FINGERPRINT, SLOTS, there)
            if content is None:
                owner.change(SlotContent(slot))
                expected.pop(slot, None)
            else:
                owner.change(SlotContent(slot, hash_of(content), content))
                expected[slot] = (hash_of(content), content)
            if looks:
                take(reader, known)
                assert {slot: block_hash for slot, (block_hash, _) in known.items()} == {
                    slot: block_hash for slot, (block_hash, _) in expected.items()
                }
        take(reader, known)
        later, all_at_once = SharedIndexReader(path, FINGERPRINT), dict[int, tuple[bytes, int | None]]()
        take(later, all_at_once)
        assert all_at_once == expected and known.keys() == expected.keys()
        for each in (owner, reader, later):
            each.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["noise", "cut", "older"]), st.integers(0, 2**20)), min_size=1, max_size=4))
def test_a_damaged_index_tells_what_was_told_or_nothing(damages: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        owner = SharedIndex(path, FINGERPRINT, SLOTS, ())
        older = path.read_bytes()
        reader = SharedIndexReader(path, FINGERPRINT)
        reader.changes()
        told = {SlotContent(slot, hash_of(slot), slot) for slot in range(SLOTS)}
        for content in told:
            owner.change(content)
        data = bytearray(path.read_bytes())
        for how, place in damages:
            place %= len(older)
            if how == "cut":
                data[place:] = b""
            elif how == "noise":
                data[place : place + 40] = random.Random(place).randbytes(40)
            else:
                data[place:] = older[place:]
        path.write_bytes(data)
        later = SharedIndexReader(path, FINGERPRINT)
        for each in (reader, later):
            assert {content for content, _ in each.changes()} <= told
            each.close()
        owner.close()


def test_an_index_of_another_fingerprint_or_format_ends_what_it_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    there = [SlotContent(slot, hash_of(slot)) for slot in range(3)]
    SharedIndex(path, FINGERPRINT, SLOTS, there).close()
    assert path.stat().st_size == index_bytes(SLOTS)
    reader = SharedIndexReader(path, FINGERPRINT)
    assert len(reader.changes()) == 3 and reader.changes() == []
    SharedIndex(path, bytes(32), SLOTS, there).close()
    assert {(content.block_hash, old) for content, old in reader.changes()} == {
        (None, hash_of(slot)) for slot in range(3)
    }
    monkeypatch.setattr(shared_index, "_FORMAT", 0)
    SharedIndex(path, FINGERPRINT, SLOTS, there).close()
    monkeypatch.undo()
    assert reader.changes() == []
    reader.close()


def test_a_reader_that_missed_more_than_the_ring_takes_the_table(tmp_path: Path) -> None:
    owner = SharedIndex(tmp_path / "index", FINGERPRINT, SLOTS, ())
    reader, known = SharedIndexReader(tmp_path / "index", FINGERPRINT), dict[int, tuple[bytes, int | None]]()
    take(reader, known)
    for number in range(30):
        owner.change(SlotContent(number % SLOTS, hash_of(number), number))
    take(reader, known)
    assert known == {number % SLOTS: (hash_of(number), number) for number in range(24, 30)}
    owner.close()
    reader.close()
