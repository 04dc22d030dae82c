"""A block list does what an ordered dictionary does."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.block_list import BlockList, block_ids

ACTIONS = st.tuples(st.sampled_from(["extend", "appendleft", "discard", "popleft", "grow"]), st.integers(0, 11))


@given(st.lists(ACTIONS, max_size=80))
def test_it_keeps_the_order_of_an_ordered_dictionary(actions: list[tuple[str, int]]) -> None:
    size, listed, expected = 4, BlockList(4), OrderedDict[int, None]()
    block_ids(0, 4)
    for action, number in actions:
        block = number % size
        if action == "grow":
            listed.grow(1)
            size += len(block_ids(size, size + 1))
        elif action == "extend":
            new = [each for each in range(block, size) if each not in expected]
            listed.extend(new)
            expected.update(dict.fromkeys(new))
        elif action == "appendleft" and block not in expected:
            listed.appendleft(block)
            expected[block] = None
            expected.move_to_end(block, last=False)
        elif action == "discard":
            assert listed.discard(block) is (block in expected)
            expected.pop(block, None)
        elif action == "popleft" and expected:
            count = 1 + number % len(expected)
            assert listed.popleft(count) == [expected.popitem(last=False)[0] for _ in range(count)]
        assert [*listed] == [*expected] and len(listed) == len(expected)
        assert all((each in listed) is (each in expected) for each in range(size))


def test_ids_are_the_same_objects_for_every_pool() -> None:
    assert all(one is other for one, other in zip(block_ids(900, 1100), block_ids(900, 1100), strict=True))
