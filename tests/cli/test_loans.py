"""Borrowed memory: what `diptych status` and `diptych top` say of it, over the wire too."""

from dataclasses import replace

from msgspec import structs

from cluster.cli.dashboard import screen
from cluster.cli.rates import Snapshot, StatusWindow
from cluster.cli.tiers import has_loans, loan_lines, loans_table
from diptych.client import ClusterStatus
from diptych.v1 import admin_pb2
from diptych.view import BorrowStats, ClusterView
from tests.cli.test_tiers import text_of
from tests.frontend.grpc.fake import view

HERE = BorrowStats("prefill-0", 48, 3_100_000, 12.25, 3, 1, (("no-room", 2),))
PAST = BorrowStats("other-0", loans=4)


def seen(*pairs: BorrowStats) -> ClusterView:
    """The decode worker borrows."""
    plain = view()
    stats = structs.replace(plain.workers[1].stats, borrowed=pairs, lent_blocks=5, borrowed_blocks=48, expired_loans=6)
    return replace(plain, workers=(plain.workers[0], structs.replace(plain.workers[1], stats=stats)))


def test_loans_arrive_as_they_were_sent() -> None:
    sent = ClusterStatus(seen(HERE, PAST), "gateway-0", 0, 1)
    message = admin_pb2.GetClusterResponse.FromString(sent.message().SerializeToString())
    stats = ClusterStatus.read(message).view.workers[1].stats
    assert stats.borrowed == (HERE, PAST)
    assert (stats.lent_blocks, stats.borrowed_blocks, stats.expired_loans) == (5, 48, 6)


def test_a_table_has_each_borrower_and_lender() -> None:
    assert has_loans(seen(HERE)) and not has_loans(view())
    rows = [line.split() for line in text_of(loans_table(seen(HERE, PAST))).splitlines()]
    assert ["decode-0", "prefill-0", "48", "3.1", "MB", "12", "s", "3", "1", "2", "no-room"] in rows
    assert ["decode-0", "other-0", "0", "0", "B", "4", "0"] in rows


def test_top_has_a_line_for_each_pair_with_blocks_on_loan() -> None:
    (line,) = loan_lines(seen(HERE, PAST))
    assert line == (
        "decode-0 borrows from prefill-0: 48 blocks, 3.1 MB, the oldest for 12 s; 1 recalls; refused: 2 no-room"
    )
    snapshots = StatusWindow()
    snapshots.add(Snapshot(0.0, ClusterStatus(seen(HERE), "gateway-0", 0, 1)))
    assert line in text_of(screen(snapshots, 200, once=True))
