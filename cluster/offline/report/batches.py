"""A sweep over static batches as a table and a picture: duration, throughput and latency each in its own column."""

from collections.abc import Sequence
from typing import Any

from cluster.offline.report.style import BLUE, GREEN, RED, drawn, panels
from cluster.offline.report.table import NOTHING, Grid
from cluster.offline.scoring.batches import BatchFigures, Spread

HEADERS = (
    "batch",
    "duration of the\nbatch, s",
    "throughput, output\ntokens/s of the batch",
    "average latency\nof a request, s",
    "average TTFT\nof a request, s",
    "repeats",
    "requests\nnot finished",
)


def batch_table(swept: Sequence[BatchFigures], lengths: str) -> Grid:
    """One row a size: medians over repeats, the range behind them."""
    title = (
        f"Static batches of {lengths} tokens: all requests of a batch are sent at once, and nothing else runs. "
        "Medians over repeats (least..greatest)."
    )
    return Grid(title, HEADERS, tuple(_row(each) for each in swept))


def _row(each: BatchFigures) -> tuple[str, ...]:
    spreads = (each.duration_s, each.throughput, each.latency_s, each.ttft_s)
    return (str(each.size), *map(_told, spreads), str(each.repeats), str(each.failed))


def _told(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    middle, least, most = (f"{value:.4g}" for value in spread)
    return middle if least == most else f"{middle} ({least}..{most})"


@drawn
def batch_curves(swept: Sequence[BatchFigures]) -> Any:
    """Throughput of the batch, duration of the batch and latency of a request over the batch's size."""
    picture, grid = panels(1, 3, 11.5, 3.8)
    sizes = [each.size for each in swept]
    shown: tuple[tuple[str, Sequence[Spread | None], str], ...] = (
        ("throughput, output tokens/s of the batch", [each.throughput for each in swept], GREEN),
        ("duration of the batch, s", [each.duration_s for each in swept], RED),
        ("average latency of a request, s", [each.latency_s for each in swept], BLUE),
    )
    for panel, (title, spreads, colour) in zip(grid.flat, shown, strict=True):
        known = [(size, spread) for size, spread in zip(sizes, spreads, strict=True) if spread is not None]
        panel.fill_between(
            [size for size, _ in known],
            [least for _, (_, least, _) in known],
            [most for _, (_, _, most) in known],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        panel.plot([size for size, _ in known], [spread[0] for _, spread in known], "o-", color=colour, markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.set_ylim(bottom=0.0)
        panel.set(title=title, xlabel="requests in the batch")
    return picture
