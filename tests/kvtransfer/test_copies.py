"""The copy plan moves exactly what a loop over single numbers moves, in as few ranges as possible."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtransfer.copies import covering, merge, pieces_of, plan_copies, refuse_outside, union_of_pieces
from kvtransfer.errors import PeerRefused
from kvtransfer.layout import LATENT_ORDER, KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Copies
from tests.kvtransfer.grids import Case, cases, shards
from tests.kvtransfer.peers import ranges

TINY = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1)  # 8 bytes a block
SIZE = TINY.block_bytes
WHOLE = Piece(0, (0, 1), (0, 1))
SMOLLM2 = KVLayout("smollm2", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
GRIDS = tuple(itertools.product((1, 2, 3, 5), (1, 2, 3)))


def plans_of(case: Case, rank: int) -> list[tuple[Piece, Copies]]:
    target = case.targets[rank]
    blocks, tokens = (case.source_blocks, case.target_blocks), (case.first_token, case.num_tokens)
    pieces = pieces_of(case.sources, target, rank)
    return [(piece, plan_copies(piece, case.sources[piece.shard], target, *blocks, *tokens)) for piece in pieces]


@settings(deadline=None)
@given(cases())
def test_plans_copy_the_same_numbers_as_a_loop_over_single_numbers(case: Case) -> None:
    random = np.random.default_rng(0)
    whole = case.sources[0]
    truth = random.integers(
        1, 255, (case.num_tokens, whole.num_kv_heads, whole.num_layers, whole.vectors, whole.slot_bytes), np.uint8
    )
    owners = [random.integers(0, 255, case.pool_blocks * rank.block_bytes, np.uint8) for rank in case.sources]
    for source_rank, pool in zip(case.sources, owners, strict=True):
        case.fill(source_rank, pool, truth)
    for rank, target in enumerate(case.targets):
        pool = np.zeros(case.pool_blocks * target.block_bytes, np.uint8)
        written = np.zeros(len(pool), np.int64)
        for piece, plan in plans_of(case, rank):
            for source, start, length in plan.tolist():
                pool[start : start + length] = owners[piece.shard][source : source + length]
                written[start : start + length] += 1
        assert (case.arrived(target, pool) == truth[:, slice(*target.heads), slice(*target.layers)]).all()
        assert written.max() == 1, "a byte is written twice"
        heads, layers, two, slots, _ = target.shape
        touched = written.reshape(-1, heads, layers, two, slots, target.slot_bytes).any(axis=(1, 2, 3, 5))
        if case.sources[0].block_size != target.block_size:
            assert not (touched & case.bystanders(target)).any(), "a slot of another token is written"
        else:  # whole blocks go: only slots behind the last token may be written too
            strangers = np.setdiff1d(np.arange(case.pool_blocks), case.target_blocks)
            assert not np.asarray(touched)[strangers].any()


ONE_LATENT_TOKEN = KVLayout("m", 2, 1, 1, 1, layers=(0, 1), order=LATENT_ORDER)  # in a block, of one layer


@settings(deadline=None)
@given(cases())
@example(
    Case(
        sources=(ONE_LATENT_TOKEN, replace(ONE_LATENT_TOKEN, layers=(1, 2))),
        targets=(replace(ONE_LATENT_TOKEN, layers=(0, 2), block_size=2),),
        source_blocks=(0, 1),
        target_blocks=(0,),
        first_token=0,
        num_tokens=2,
        pool_blocks=24,
    )
)
def test_plans_are_sorted_by_target_and_leave_nothing_to_merge(case: Case) -> None:
    for rank in range(len(case.targets)):
        for _, plan in plans_of(case, rank):
            assert (np.diff(plan[:, 1]) > 0).all()
            assert merge(plan).tolist() == plan.tolist()
            touching = (plan[:-1, :2] + plan[:-1, 2:] == plan[1:, :2]).all(axis=1)
            assert not touching.any()


@settings(deadline=None)
@given(cases())
def test_pieces_cover_each_rank_once_and_no_two_come_from_one_owner(case: Case) -> None:
    for rank, target in enumerate(case.targets):
        pieces = pieces_of(case.sources, target, rank)
        held = np.zeros((target.num_kv_heads, target.num_layers), int)
        for piece in pieces:
            held[slice(*piece.heads), slice(*piece.layers)] += 1
        wanted = np.zeros_like(held)
        wanted[slice(*target.heads), slice(*target.layers)] = 1
        assert (held == wanted).all()
        assert len({piece.shard for piece in pieces}) == len(pieces)
        # No fewer could do: boxes of one gang are equal or disjoint, so each that has something of ours is needed.
        boxes = {(source.heads, source.layers) for source in case.sources}
        assert len(pieces) == sum(
            max(heads[0], target.heads[0]) < min(heads[1], target.heads[1])
            and max(layers[0], target.layers[0]) < min(layers[1], target.layers[1])
            for heads, layers in boxes
        )


@pytest.mark.parametrize("readers", GRIDS)
def test_equal_gangs_read_rank_from_rank_in_one_range_for_each_run(readers: tuple[int, int]) -> None:
    ranks = shards(SMOLLM2, *readers)
    for rank, target in enumerate(ranks):
        (piece,) = pieces_of(ranks, target, rank)
        plan = plan_copies(piece, ranks[piece.shard], target, (4, 5, 6, 9), (1, 2, 3, 4), 0, 64)
        size = target.block_bytes
        assert plan.tolist() == [[4 * size, size, 3 * size], [9 * size, 4 * size, size]]


def test_replicated_heads_are_read_from_all_their_owners() -> None:
    owners = shards(SMOLLM2, 6, 1)
    readers = shards(SMOLLM2, 6, 1)
    assert {pieces_of(owners, target, rank)[0].shard for rank, target in enumerate(readers)} == set(range(6))
    assert len(union_of_pieces(tuple(owners), tuple((target, rank) for rank, target in enumerate(readers)))) == 6


def test_a_reader_of_all_layers_takes_one_range_of_heads_from_each_block() -> None:
    owner, reader = shards(SMOLLM2, 1, 1)[0], shards(SMOLLM2, 2, 1)[1]
    (piece,) = pieces_of([owner], reader, 1)
    assert len(plan_copies(piece, owner, reader, (4, 5, 6), (1, 2, 3), 0, 48)) == 3


def test_a_stage_takes_one_range_for_each_head() -> None:
    owner, reader = shards(SMOLLM2, 1, 1)[0], shards(SMOLLM2, 1, 2)[1]
    (piece,) = pieces_of([owner], reader, 1)
    assert len(plan_copies(piece, owner, reader, (4, 5, 6), (1, 2, 3), 0, 48)) == 9


def tiny_plan(sources: tuple[int, ...], targets: tuple[int, ...]) -> list[list[int]]:
    return plan_copies(WHOLE, TINY, TINY, sources, targets, 0, len(sources)).tolist()


def test_ascending_runs_become_one_copy() -> None:
    assert tiny_plan((4, 5, 6), (1, 2, 3)) == [[4 * SIZE, SIZE, 3 * SIZE]]


def test_runs_in_opposite_order_do_not_merge() -> None:
    assert len(tiny_plan((6, 5, 4), (1, 2, 3))) == 3


def test_no_tokens_need_no_copies() -> None:
    assert tiny_plan((), ()) == []


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_covering_blocks_hold_these_tokens_and_no_fewer_would(size: int, first: int, count: int) -> None:
    start, stop = covering(size, first, count)
    assert set(range(start, stop)) == {token // size for token in range(first, first + count)}


def test_kv_of_other_weights_is_refused() -> None:
    other = KVLayout("other", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1)
    with pytest.raises(PeerRefused, match="same weights"):
        pieces_of([other], TINY, 0)


@pytest.mark.parametrize(("block_size", "dtype"), [(8, "float32"), (4, "bfloat16")])
def test_blocks_with_state_of_another_size_or_dtype_are_refused(block_size: int, dtype: str) -> None:
    ours = KVLayout("m", 4, 2, 8, 4, state_layers=(0, 1, 2))
    assert pieces_of([ours], ours, 0)
    with pytest.raises(PeerRefused, match=r"need the same engine\.block_size and engine\.dtype on both sides"):
        pieces_of([KVLayout("m", 4, 2, 8, block_size, dtype, state_layers=(0, 1, 2))], ours, 0)


def test_kv_that_no_rank_holds_is_refused() -> None:
    first, _ = shards(SMOLLM2, 1, 2)
    with pytest.raises(PeerRefused, match=r"layers \(0, 30\).*not all of it"):
        pieces_of([first], SMOLLM2, 0)
    with pytest.raises(PeerRefused, match="nothing"):
        pieces_of([], SMOLLM2, 0)


@pytest.mark.parametrize(
    ("sources", "targets"), [((1, 2), (1,)), ((1,), (1, 2)), ((1, 2), (3, 3)), ((-1, 0), (0, 1)), ((0, 1), (-1, 0))]
)
def test_invalid_orders_raise(sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        plan_copies(WHOLE, TINY, TINY, sources, targets, 0, 2)


def test_an_order_that_begins_inside_a_block_of_the_owner_raises() -> None:
    with pytest.raises(ValueError, match="token 8 begins no block"):
        plan_copies(Piece(0, (0, 3), (0, 30)), SMOLLM2, SMOLLM2, (1,), (1,), 8, 8)


@pytest.mark.parametrize("row", [(90, 0, 11), (-1, 0, 5), (0, 0, 0)])
def test_ranges_outside_the_owners_pool_are_refused(row: tuple[int, int, int]) -> None:
    with pytest.raises(PeerRefused):
        refuse_outside(ranges((0, 0, 100), row), source_bytes=100, target_bytes=100)


def test_ranges_outside_our_pool_raise() -> None:
    with pytest.raises(ValueError, match=r"bytes 90\.\.101 are outside our 100"):
        refuse_outside(ranges((0, 90, 11)), source_bytes=100, target_bytes=100)
