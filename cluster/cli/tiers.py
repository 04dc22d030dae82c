"""Prints the tiers of workers' prefix caches: a table, one line per pool, and what is wrong. Opens no connection."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cluster.cli.screen import plain_table, size
from diptych.view import ClusterView, TierStats, WorkerView

if TYPE_CHECKING:
    from rich.table import Table


def has_tiers(view: ClusterView) -> bool:
    return any(worker.stats.tiers for worker in view.workers)


def tiers_table(view: ClusterView) -> "Table":
    """A row for each tier of a worker. Counts are since the worker's start."""
    from rich.markup import escape

    places, counts = ("worker", "tier", ">blocks", ">of", ">pinned", ">capacity"), (">dropped", ">late", ">failed")
    table = plain_table(*places, ">hits", ">read", ">written", *counts, "detail")
    for worker in view.workers:
        stats = worker.stats
        device = f"{stats.cached_blocks}", f"{stats.total_blocks}", "", "", f"{stats.device_hit_tokens} tok"
        table.add_row(worker.name, "device", *device)
        for tier in stats.tiers:
            moved = size(tier.capacity_blocks * tier.block_bytes), f"{tier.hit_tokens} tok"
            amounts = size(tier.read_bytes), size(tier.written_bytes)
            failed = map(str, (tier.dropped_blocks, tier.late, tier.failures))
            blocks = str(tier.blocks), str(tier.capacity_blocks), str(tier.pinned_blocks or "")
            table.add_row("", tier.name, *blocks, *moved, *amounts, *failed, escape(tier.trouble))
    return table


def tier_lines(view: ClusterView) -> Iterator[str]:
    """One line for each pool whose workers have tiers behind the device."""
    for pool in dict.fromkeys(worker.pool for worker in view.workers if worker.stats.tiers):
        members = [worker for worker in view.workers if worker.pool == pool]
        hits = {"device": sum(worker.stats.device_hit_tokens for worker in members)}
        blocks = []
        for name in dict.fromkeys(tier.name for _, tier in _tiers(members)):
            of = [tier for _, tier in _tiers(members) if tier.name == name]
            hits[name] = sum(tier.hit_tokens for tier in of)
            held, most = sum(tier.blocks for tier in of), sum(tier.capacity_blocks for tier in of)
            blocks.append(f"{name} {held}/{most} blocks")
        found = ", ".join(f"{name} {count}" for name, count in hits.items())
        yield f"{pool} cache: {', '.join(blocks)}; tokens found: {found}"


def tier_troubles(view: ClusterView) -> Iterator[str]:
    """Tiers that stopped, or store nothing."""
    for worker, tier in _tiers(view.workers):
        if tier.trouble:
            yield f"{worker.name}: {tier.name} cache: {tier.trouble}"


def _tiers(workers: "tuple[WorkerView, ...] | list[WorkerView]") -> Iterator[tuple[WorkerView, TierStats]]:
    return ((worker, tier) for worker in workers for tier in worker.stats.tiers)
