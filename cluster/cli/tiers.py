"""Prints tiers of workers' prefix caches and memory that they borrow, as tables and lines. Opens no connection."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from cluster.cli.screen import plain_table, size
from diptych.view import BorrowStats, ClusterView, TierStats, WorkerView

if TYPE_CHECKING:
    from rich.table import Table


def has_tiers(view: ClusterView) -> bool:
    return any(worker.stats.tiers for worker in view.workers)


def tiers_table(view: ClusterView) -> "Table":
    """A row for each tier of a worker, and for what it fetched from others. Counts are since the worker's start."""
    from rich.markup import escape

    places, counts = ("worker", "tier", ">blocks", ">of", ">pinned", ">capacity"), (">dropped", ">late", ">failed")
    table = plain_table(*places, ">hits", ">saved", ">lent", ">read", ">written", *counts, "detail")
    for worker in view.workers:
        device, fetched, *tiers = worker.stats.sources
        table.add_row(worker.name, device.name, f"{device.blocks}", f"{device.capacity_blocks}", "", "", *_hits(device))
        if fetched.hit_tokens:
            table.add_row("", fetched.name, *[""] * 4, *_hits(fetched))
        for tier in tiers:
            amounts = size(tier.read_bytes), size(tier.written_bytes)
            failed = map(str, (tier.dropped_blocks, tier.late, tier.failures))
            blocks = str(tier.blocks), str(tier.capacity_blocks), str(tier.pinned_blocks or "")
            capacity = size(tier.capacity_blocks * tier.block_bytes)
            table.add_row("", tier.name, *blocks, capacity, *_hits(tier), *amounts, *failed, escape(tier.trouble))
    return table


def _hits(tier: TierStats) -> tuple[str, str, str]:
    return f"{tier.hit_tokens} tok", f"{tier.saved_s:.1f} s", f"{tier.lent_tokens} tok" if tier.lent_tokens else ""


def tier_lines(view: ClusterView) -> Iterator[str]:
    """One line for each pool whose workers have tiers behind the device."""
    for pool in dict.fromkeys(worker.pool for worker in view.workers if worker.stats.tiers):
        members = [worker for worker in view.workers if worker.pool == pool]
        hits, saved_s, blocks = Counter[str](), 0.0, []
        for source in chain.from_iterable(worker.stats.sources for worker in members):
            hits[source.name] += source.hit_tokens
            saved_s += source.saved_s
        for name in dict.fromkeys(tier.name for _, tier in _tiers(members)):
            of = [tier for _, tier in _tiers(members) if tier.name == name]
            held, most = sum(tier.blocks for tier in of), sum(tier.capacity_blocks for tier in of)
            blocks.append(f"{name} {held}/{most} blocks")
        found = ", ".join(f"{name} {count}" for name, count in hits.items() if count or name != "fetched")
        yield f"{pool} cache: {', '.join(blocks)}; tokens found: {found}; saved {saved_s:.1f} s"


def tier_problems(view: ClusterView) -> Iterator[str]:
    """Tiers that stopped, or store nothing."""
    for worker, tier in _tiers(view.workers):
        if tier.trouble:
            yield f"{worker.name}: {tier.name} cache: {tier.trouble}"


def _tiers(workers: "tuple[WorkerView, ...] | list[WorkerView]") -> Iterator[tuple[WorkerView, TierStats]]:
    return ((worker, tier) for worker in workers for tier in worker.stats.tiers)


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
