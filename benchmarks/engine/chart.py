"""The part `engine` as a picture: a panel per column, a bar per engine, a mark at the machine's limit.

It needs only the report, so a recorded one can be drawn again. Needs matplotlib (the `bench` extra).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.compare import SHARE, WALL
from benchmarks.figures import BenchmarkPart, BenchmarkReport, Figure, Spread

OURS, OPT_IN, PEER, LIMIT = "#0b6e4f", "#7cc4a4", "#b9bec6", "#c1292e"
MISSING = "no chart: matplotlib is missing; install it with `pip install 'diptych[bench]'`"


def missing() -> str:
    """The reason why no chart can be drawn, or an empty text."""
    from importlib.util import find_spec

    return "" if find_spec("matplotlib") else MISSING


def draw(report: BenchmarkReport, part: BenchmarkPart, file: Path) -> None:
    """Write the chart in the format of the file's suffix (.png, .svg). Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure as Picture

    speeds, shares = _cells(part, WALL), _cells(part, SHARE)
    names = list(dict.fromkeys(name for name, _ in speeds))
    columns = list(dict.fromkeys(column for _, column in speeds))
    picture = Picture(figsize=(3.0 * len(columns) + 2.0, 0.34 * len(names) + 1.9), layout="constrained")
    panels: Any = picture.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        _panel(panel, column, names, speeds, shares)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    picture.suptitle(f"Tokens per second, more is better: SmolLM2-135M on {report.cores} cores of {report.cpus}")
    picture.supxlabel(
        "bars: median of the rounds, thin lines: minimum to maximum; red: the machine's limit with these weights, "
        "or the share of it",
        fontsize=8,
    )
    picture.savefig(file, dpi=130)


def _panel(
    panel: Any,
    column: str,
    names: Sequence[str],
    speeds: Mapping[tuple[str, str], Spread],
    shares: Mapping[tuple[str, str], Spread],
) -> None:
    """One column. A limit far beyond all bars is written at the edge as a share."""
    panel.set_title(column, fontsize=10)
    fastest = max(speeds[name, column].high for name in names)
    edge = 1.8 * fastest
    for row, name in enumerate(names):
        speed, share = speeds[name, column], shares[name, column].median
        panel.barh(row, speed.median, height=0.72, color=_color(name))
        panel.hlines(row, speed.low, speed.high, color="black", linewidth=0.8)
        panel.text(speed.high + 0.015 * edge, row, f"{speed.median:.0f}", va="center", fontsize=7.5)
        limit = speed.median / share
        if limit < edge:
            panel.vlines(limit, row - 0.4, row + 0.4, color=LIMIT, linewidth=2)
        else:
            panel.text(edge, row, f"{share:.0%} ▸", va="center", ha="right", fontsize=7, color=LIMIT)
    panel.set_xlim(0, edge)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _color(name: str) -> str:
    if not name.startswith("diptych "):
        return PEER
    return OURS if name.startswith("diptych float32") else OPT_IN


def _cells(part: BenchmarkPart, table: str) -> dict[tuple[str, str], Spread]:
    figures: Sequence[Figure] = part.figures
    return {(figure.row, figure.column): figure.spread for figure in figures if figure.table == table}
