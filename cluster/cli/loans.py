"""Prints which worker borrows memory from which: a table, and one line for each pair. Opens no connection."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cluster.cli.screen import plain_table, size
from diptych.view import BorrowStats, ClusterView

if TYPE_CHECKING:
    from rich.table import Table


def has_loans(view: ClusterView) -> bool:
    return any(worker.stats.borrowed for worker in view.workers)


def loans_table(view: ClusterView) -> "Table":
    """A row for each borrower and lender. Loans, recalls and refusals are counted since the borrower's start."""
    from rich.markup import escape

    table = plain_table("borrower", "lender", ">blocks", ">size", ">oldest", ">loans", ">recalls", "refused")
    for borrower, pair in _pairs(view):
        amounts = str(pair.blocks), size(pair.num_bytes), f"{pair.oldest_s:.0f} s" if pair.blocks else ""
        counts = str(pair.loans), str(pair.recalls)
        table.add_row(escape(borrower), escape(pair.lender), *amounts, *counts, escape(_refusals(pair)))
    return table


def loan_lines(view: ClusterView) -> Iterator[str]:
    """One line for each pair with blocks on loan."""
    for borrower, pair in _pairs(view):
        if pair.blocks:
            amount = f"{pair.blocks} blocks, {size(pair.num_bytes)}, the oldest for {pair.oldest_s:.0f} s"
            refused = f"; refused: {refusals}" if (refusals := _refusals(pair)) else ""
            yield f"{borrower} borrows from {pair.lender}: {amount}; {pair.recalls} recalls{refused}"


def _pairs(view: ClusterView) -> Iterator[tuple[str, BorrowStats]]:
    return ((worker.name, pair) for worker in view.workers for pair in worker.stats.borrowed)


def _refusals(pair: BorrowStats) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in pair.refusals)
