"""The copy plan moves exactly what a naive loop moves, in as few ranges as possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.copies import merge, plan_copies, refuse_outside
from kvtransfer.errors import PeerRefused
from kvtransfer.layout import KVLayout
from kvtransfer.transport import Copy

TINY = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1)  # 8 bytes a block
SIZE = TINY.block_bytes
POOL = 24

block_pairs = st.integers(0, 12).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, POOL - 1), min_size=count, max_size=count),
        st.lists(st.integers(0, POOL - 1), min_size=count, max_size=count, unique=True),
    )
)


@given(block_pairs)
def test_the_plan_moves_what_a_naive_loop_moves(pairs: tuple[list[int], list[int]]) -> None:
    sources, targets = pairs
    pool = bytes(i % 251 for i in range(POOL * SIZE))
    naive, planned = bytearray(POOL * SIZE), bytearray(POOL * SIZE)
    for source, target in zip(sources, targets, strict=True):
        for byte in range(SIZE):
            naive[target * SIZE + byte] = pool[source * SIZE + byte]
    for copy in plan_copies(tuple(sources), tuple(targets), TINY, TINY):
        planned[copy.target : copy.target + copy.num_bytes] = pool[copy.source : copy.source + copy.num_bytes]
    assert planned == naive


@given(block_pairs)
def test_the_plan_is_sorted_by_target_and_leaves_nothing_to_merge(pairs: tuple[list[int], list[int]]) -> None:
    plan = plan_copies(tuple(pairs[0]), tuple(pairs[1]), TINY, TINY)
    assert list(plan) == sorted(plan, key=lambda copy: copy.target)
    assert merge(plan) == plan


def test_ascending_runs_become_one_copy() -> None:
    assert plan_copies((4, 5, 6), (1, 2, 3), TINY, TINY) == (Copy(4 * SIZE, SIZE, 3 * SIZE),)


def test_runs_in_opposite_order_do_not_merge() -> None:
    assert len(plan_copies((6, 5, 4), (1, 2, 3), TINY, TINY)) == 3


def test_no_blocks_need_no_copies() -> None:
    assert plan_copies((), (), TINY, TINY) == ()


def test_kv_of_other_weights_is_refused() -> None:
    other = KVLayout("other", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1)
    with pytest.raises(PeerRefused, match="same weights"):
        plan_copies((1,), (1,), other, TINY)


def test_another_shard_of_the_model_is_refused() -> None:
    ranks = [KVLayout("m", 2, 2, 4, 4, heads=heads) for heads in ((0, 1), (1, 2))]
    with pytest.raises(PeerRefused, match="parallelism"):
        plan_copies((1,), (1,), *ranks)


@pytest.mark.parametrize(("sources", "targets"), [((1, 2), (1,)), ((1, 2), (3, 3)), ((-1,), (0,)), ((0,), (-1,))])
def test_pairs_that_make_no_sense_raise(sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        plan_copies(sources, targets, TINY, TINY)


@pytest.mark.parametrize("copy", [Copy(90, 0, 11), Copy(-1, 0, 5), Copy(0, 0, 0)])
def test_ranges_outside_the_owners_pool_are_refused(copy: Copy) -> None:
    with pytest.raises(PeerRefused):
        refuse_outside((copy,), source_bytes=100, target_bytes=100)
