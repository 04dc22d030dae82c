"""The block pool: no block is allocated twice or lost, prefixes are found and evicted in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.blocks import BlockPool, OutOfBlocks, block_hashes, tail_hash


class PoolMachine(RuleBasedStateMachine):
    """Random owners allocate, share, cache and free; a model of plain lists knows which owner holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(14, 4, reserved=2)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        try:
            blocks = self.pool.allocate(count)
        except OutOfBlocks:
            assert count > free
            assert self.pool.num_free == free
            return
        assert len(blocks) == count and sorted(set(blocks)) == blocks and all(block >= 2 for block in blocks)
        assert not {b for held in self.held for b in held} & set(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free(self.held.pop(index))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), content=st.integers(0, 5))
    def block_hash(self, data: st.DataObject, content: int) -> None:
        blocks = data.draw(st.sampled_from([blocks for blocks in self.held if blocks]))
        self.pool.cache_block(data.draw(st.sampled_from(blocks)), bytes([content]))

    @rule(contents=st.lists(st.integers(0, 5), max_size=3))
    def match(self, contents: list[int]) -> None:
        self.held.append(self.pool.match([bytes([content]) for content in contents]))

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.pool.check(self.held)


TestPool = PoolMachine.TestCase


def test_freed_blocks_come_back_in_ascending_runs() -> None:
    pool = BlockPool(12, 4, reserved=2)
    first = pool.allocate(6)
    pool.free(first[3:])
    pool.free(first[:3])
    assert pool.allocate(6) == [2, 3, 4, 5, 6, 7]


def test_a_named_block_is_found_until_it_is_evicted() -> None:
    pool = BlockPool(4, 4)
    hashes = block_hashes(range(8), 4)
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.cache_block(block, block_hash)
    pool.free(blocks)
    assert pool.num_cached == 2
    assert pool.match(hashes) == blocks
    pool.free(blocks)
    other = pool.allocate(3)  # two were clean; the third evicts the tail first, so the head stays usable
    assert pool.match(hashes) == blocks[:1]
    pool.free(blocks[:1])
    pool.free(other)
    pool.check()


def test_equal_prefixes_have_equal_names_and_a_change_renames_all_that_follows() -> None:
    one = block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    two = block_hashes([1, 2, 3, 4, 5, 6, 7, 9], 4)
    assert len(one) == 2 and one[0] == two[0] and one[1] != two[1]
    assert block_hashes([9, 2, 3, 4, 5, 6, 7, 8], 4)[1] != one[1]
    assert block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, one[:1]) == one


@given(*[st.lists(st.integers(0, 3), max_size=20)] * 2, *[st.text(max_size=3)] * 2)
def test_blocks_of_different_salts_never_have_the_same_name(a: list[int], b: list[int], one: str, other: str) -> None:
    def hashes(tokens: list[int], salt: str) -> set[bytes]:
        full = block_hashes(tokens, 4, salt=salt)
        assert full == block_hashes(tokens, 4, full[:1], salt)
        return {*full, *([tail_hash(tokens, 4, full, salt)] if tokens else [])}

    assert one == other or not hashes(a, one) & hashes(b, other)


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
