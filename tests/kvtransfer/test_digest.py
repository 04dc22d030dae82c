"""Digests made where KV was computed agree with what arrived, however it was sharded, and with nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from kvtransfer.copies import pieces_of
from kvtransfer.digest import MAX_DIGESTS, combine, digest_cells, spans_of, verify_piece, watch_reply
from kvtransfer.errors import DigestMismatch, PeerRefused
from kvtransfer.ticket import Piece
from kvtransfer.transport import Region
from tests.kvtransfer.grids import Case, by_slots, cases
from tests.kvtransfer.peers import LAYOUT, cells_of, make_region, whole_piece


def reported(case: Case, piece: Piece, truth: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> tuple[int, ...]:
    """The owner's digests of a piece of each block."""
    layout = case.sources[piece.shard]
    region = make_region(layout, case.pool_blocks)
    case.fill(layout, np.frombuffer(region.bytes(), np.uint8), truth)
    size = layout.block_size
    slots = [(block, min(size, case.num_tokens - i * size)) for i, block in enumerate(case.source_blocks)]
    return combine(digest_cells(region, slots), layout, piece)


@settings(deadline=None)
@given(cases())
def test_digests_match_what_arrived_and_detect_any_changed_byte(case: Case) -> None:
    random = np.random.default_rng(0)
    whole = case.sources[0]
    shape = case.num_tokens, whole.num_kv_heads, whole.num_layers, whole.vectors, whole.slot_bytes
    truth = random.integers(0, 255, shape, np.uint8)
    for rank, target in enumerate(case.targets):
        pool = random.integers(0, 255, case.pool_blocks * target.block_bytes, np.uint8)
        blocks, before = by_slots(pool, target), case.first_token // target.block_size
        for token in range(case.num_tokens):
            block, slot = divmod(case.first_token + token, target.block_size)
            local = truth[token, slice(*target.heads), slice(*target.layers)]
            blocks[case.target_blocks[block - before], :, :, :, slot] = local
        for piece in pieces_of(case.sources, target, rank):

            def verify(piece: Piece = piece, pool: np.ndarray = pool, target=target) -> None:
                spans = spans_of(
                    whole.block_size, target.block_size, case.target_blocks, case.first_token, case.num_tokens
                )
                digests = reported(case, piece, truth)
                arrived = Region(target, case.pool_blocks, pool.ctypes.data, pool)
                verify_piece(arrived, 0, target, piece, spans, digests, case.source_blocks)

            verify()
            token = int(random.integers(case.num_tokens))
            block, slot = divmod(case.first_token + token, target.block_size)
            head = piece.heads[1] - 1 - target.heads[0]
            blocks[case.target_blocks[block - before], head, piece.layers[0] - target.layers[0], -1, slot, -1] ^= 1
            owner = case.source_blocks[token // whole.block_size]
            with pytest.raises(DigestMismatch, match=f"the owner's block {owner}, "):
                verify()
            blocks[case.target_blocks[block - before], head, piece.layers[0] - target.layers[0], -1, slot, -1] ^= 1


def test_slots_without_tokens_do_not_count() -> None:
    region = make_region(filled=True)
    before = digest_cells(region, [(5, 7)])
    by_slots(np.frombuffer(region.bytes(), np.uint8), LAYOUT)[5, :, :, :, 7:] = 0
    assert digest_cells(region, [(5, 7)]) == before
    by_slots(np.frombuffer(region.bytes(), np.uint8), LAYOUT)[5, 1, 3, 1, 6, 0] ^= 1
    assert digest_cells(region, [(5, 7)]) != before


def test_cells_of_equal_bytes_differ_by_head_and_layer() -> None:
    cells = np.frombuffer(digest_cells(make_region(), [(3, 16)])[0], "<u8")
    assert len(set(cells.tolist())) == len(cells) == whole_piece().num_cells


def test_pieces_of_a_block_add_up() -> None:
    cells = cells_of(make_region(filled=True), (4, 5))
    (whole,) = (combine(cells, LAYOUT, whole_piece()),)
    parts = [combine(cells, LAYOUT, Piece(0, heads, (0, 4))) for heads in ((0, 1), (1, 2))]
    assert whole == tuple((a + b) % 2**64 for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("piece", [Piece(0, (0, 3), (0, 4)), Piece(0, (1, 1), (0, 4)), Piece(0, (-1, 1), (0, 4))])
def test_a_piece_that_the_rank_does_not_hold_is_refused(piece: Piece) -> None:
    with pytest.raises(PeerRefused, match="was requested"):
        combine(cells_of(make_region(), (4,)), LAYOUT, piece)


@pytest.mark.parametrize("shard", [-1, 1])
def test_a_piece_of_no_rank_is_refused(shard: int) -> None:
    with pytest.raises(PeerRefused, match="none of our ranks"):
        watch_reply([(bytes(64),)], [LAYOUT], (replace(whole_piece(), shard=shard),), 0, 1, finished=True, ttl_s=1.0)


def test_digests_that_exceed_one_reply_come_in_the_next() -> None:
    pieces = (whole_piece(),) * 4096
    count = MAX_DIGESTS // len(pieces) + 3
    cells = [(bytes(8 * whole_piece().num_cells),) * count]
    first = watch_reply(cells, [LAYOUT], pieces, 10, 10 + count, finished=True, ttl_s=1.0)
    assert (first.ready_blocks, first.finished) == (10 + count - 3, False)
    assert {len(piece) for piece in first.digests} == {count - 3}
    rest = watch_reply([cells[0][-3:]], [LAYOUT], pieces, first.ready_blocks, 10 + count, finished=True, ttl_s=1.0)
    assert (rest.ready_blocks, rest.finished) == (10 + count, True)
