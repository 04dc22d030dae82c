"""The study as pictures; the same figures give the same bytes. Needs matplotlib (`diptych[pictures]`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.answers import StudyFigures
from benchmarks.study.cells import (
    BUDGETS,
    CHUNKED,
    LOADS,
    ORCA,
    PREFILL_FIRST,
    PREFILL_ONLY,
    REFERENCE,
    STATIC,
    TPOT_SLO,
    Cell,
    Grid,
    PolicyVariant,
)
from benchmarks.study.page import LOAD
from benchmarks.study.real import NAIVE_ANSWER
from benchmarks.study.record import Measured
from benchmarks.study.workload import MIXES
from workers.profiles.fit import relative_error

COLORS = {
    "static": "#8d99ae",
    "orca": "#e09f3e",
    "prefill-first": "#9e2a2b",
    "chunked": "#0b6e4f",
    "prefill-only": "#5a4fcf",
}
MARKERS = {"static": "s", "orca": "D", "prefill-first": "v", "chunked": "o", "prefill-only": "^"}
MISSING = "no pictures: matplotlib is missing; install it with `pip install 'diptych[bench]'`"
STYLE: Any = {
    "svg.hashsalt": "diptych",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
AT_512 = (STATIC, ORCA, PREFILL_FIRST, REFERENCE, PREFILL_ONLY[BUDGETS.index(REFERENCE.budget)])

Measure = Callable[[StudyFigures], float]


def missing() -> str:
    """The reason why nothing can be drawn, or an empty text."""
    from importlib.util import find_spec

    return "" if find_spec("matplotlib") else MISSING


def draw(folder: Path, measured: Measured, grid: Grid, suffix: str = "svg") -> None:
    """Write all pictures into the folder. Raises ImportError without matplotlib."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, picture in {
            "tradeoff": _tradeoff(grid),
            "load": _load(grid),
            "chunk": _chunk(grid),
            "naive": _naive(measured),
            "fit": _fit(measured),
        }.items():
            metadata = {"Date": None} if suffix == "svg" else None
            picture.savefig(folder / f"batching-{name}.{suffix}", metadata=metadata, dpi=110)


def _picture(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    return picture, picture.subplots(rows, columns, squeeze=False, **options)


def _plain(axis: Any) -> None:
    """A few plain numbers as ticks of a logarithmic axis, instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _scale(panel: Any, logarithmic: bool) -> None:
    """The scale of the y axis: logarithmic, or from zero."""
    if logarithmic:
        panel.set_yscale("log")
        _plain(panel.yaxis)
    else:
        panel.set_ylim(0, 1.08 * panel.get_ylim()[1])


def _tradeoff(grid: Grid) -> Any:
    """TTFT against worst gap, one panel per mix: lower means smoother streams, further left faster first tokens."""
    picture, panels = _picture(2, 3, 10.5, 6.6)
    cells = list(panels.flat)
    for panel, mix in zip(cells, MIXES, strict=False):

        def at(who: PolicyVariant, mix: str = mix) -> tuple[float, float]:
            figures = grid[Cell(who.name, mix, LOAD)].pooled
            return figures.ttft_p90_s, figures.gap_p99_s

        panel.set(xscale="log", yscale="log", title=mix)
        panel.plot(*zip(*map(at, CHUNKED), strict=True), "o-", color=COLORS["chunked"], label="chunked 64 to 1024")
        for who in (CHUNKED[0], CHUNKED[-1]):
            panel.annotate(f"{who.budget}", at(who), xytext=(7, -3), textcoords="offset points", fontsize=7.5)
        panel.plot(*at(TPOT_SLO), "*", markersize=10, color=COLORS["chunked"], label="chunked 512 with a TPOT SLO")
        for who in (STATIC, ORCA, PREFILL_FIRST, AT_512[-1]):
            look = {"marker": MARKERS[who.batching], "color": COLORS[who.batching]}
            panel.plot(*at(who), **look, linestyle="", markersize=7, label=who.name)
        for axis in (panel.xaxis, panel.yaxis):
            _plain(axis)
        panel.margins(0.12)
    cells[-1].axis("off")
    cells[-1].legend(*cells[0].get_legend_handles_labels(), loc="center")
    picture.supxlabel("time to first token, 90th percentile, s")
    picture.supylabel("worst gap of a request, 99th percentile, s")
    picture.suptitle(f"Who waits: {LOAD:.0%} of capacity; left is better for prompts, down for those who read along")
    return picture


def _load(grid: Grid) -> Any:
    """Three figures over the load, a column for each mix."""
    rows: Sequence[tuple[str, bool, Measure]] = (
        ("TTFT p90, s", True, lambda figures: figures.ttft_p90_s),
        ("TPOT mean, ms", False, lambda figures: 1e3 * figures.tpot_mean_s),
        ("worst gap p99, s", True, lambda figures: figures.gap_p99_s),
    )
    picture, panels = _picture(len(rows), len(MIXES), 12.5, 6.8, sharex=True)
    for column, mix in enumerate(MIXES):
        for row, (label, logarithmic, measure) in enumerate(rows):
            panel = panels[row][column]
            for who in AT_512:
                values = [measure(grid[Cell(who.name, mix, load)].pooled) for load in LOADS]
                look = {"marker": MARKERS[who.batching], "color": COLORS[who.batching]}
                panel.plot(LOADS, values, **look, markersize=5, alpha=0.7, label=who.name)
            panel.set(xticks=LOADS, xticklabels=[f"{load:.0%}" for load in LOADS])
            panel.margins(x=0.08, y=0.12)
            _scale(panel, logarithmic)
            if column == 0:
                panel.set_ylabel(label)
            if row == 0:
                panel.set_title(mix)
    picture.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(AT_512))
    picture.supxlabel("arrivals, share of the mix's capacity")
    return picture


def _chunk(grid: Grid) -> Any:
    """The effect of a step's budget, for chunked and prefill-only, beside prefill-first."""
    rows: Sequence[tuple[str, float | None, bool, Measure]] = (
        ("TTFT p50, s", LOAD, False, lambda figures: figures.ttft_p50_s),
        ("TPOT mean, ms", LOAD, False, lambda figures: 1e3 * figures.tpot_mean_s),
        ("worst gap p99, s", LOAD, True, lambda figures: figures.gap_p99_s),
        ("all tokens/s,\nunder full load", None, False, lambda figures: figures.total_rate),
    )
    mixes = ("short/long", "long/short", "mixed")
    picture, panels = _picture(len(rows), len(mixes), 9.5, 8.6, sharex=True)
    for column, mix in enumerate(mixes):
        for row, (label, load, logarithmic, measure) in enumerate(rows):
            panel = panels[row][column]
            for family in (CHUNKED, PREFILL_ONLY):
                values = [measure(grid[Cell(who.name, mix, load)].pooled) for who in family]
                name = family[0].batching
                panel.plot(BUDGETS, values, marker=MARKERS[name], markersize=5, color=COLORS[name], label=name)
            whole = measure(grid[Cell(PREFILL_FIRST.name, mix, load)].pooled)
            panel.axhline(whole, color=COLORS["prefill-first"], linestyle="--", label="prefill-first 512")
            panel.set(xscale="log", xticks=BUDGETS, xticklabels=list(map(str, BUDGETS)))
            panel.minorticks_off()
            _scale(panel, logarithmic)
            if column == 0:
                panel.set_ylabel(label)
            if row == 0:
                panel.set_title(mix)
    picture.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    picture.supxlabel(f"tokens of a step at most; upper three rows at {LOAD:.0%} of capacity")
    return picture


def _naive(measured: Measured) -> Any:
    """Three columns that are easily confused."""
    batches = [each.batch for each in measured.naive]
    columns = (
        ("duration of the batch, s", [each.duration_s for each in measured.naive]),
        ("output tokens/s", [each.batch * NAIVE_ANSWER / each.duration_s for each in measured.naive]),
        ("average latency of a request, s", [each.latency_s for each in measured.naive]),
    )
    picture, panels = _picture(1, 3, 9.5, 2.7)
    for panel, (label, values) in zip(panels[0], columns, strict=True):
        panel.plot(batches, values, "o-", color=COLORS["static"])
        panel.set(xscale="log", title=label, xticks=batches, xticklabels=list(map(str, batches)), xlabel="batch")
        panel.minorticks_off()
        panel.set_ylim(0, 1.1 * max(values))
    return picture


def _fit(measured: Measured) -> Any:
    """Relative error of the cost model over the measured time; filled points are held out from the fit."""
    picture, panels = _picture(1, 1, 7.5, 3.2)
    panel = panels[0][0]
    kinds = {"prompts": COLORS["prefill-first"], "decodes": COLORS["chunked"], "mixed": COLORS["orca"]}
    for kind, color in kinds.items():
        for held_out in (False, True):
            points = [each for each in measured.points if (each.shape.kind, each.held_out) == (kind, held_out)]
            panel.plot(
                [1e3 * each.seconds for each in points],
                [100 * relative_error(measured.cost, each) for each in points],
                "o",
                color=color,
                fillstyle="full" if held_out else "none",
                label=f"{kind}, {'held out' if held_out else 'seen'}",
            )
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set(xscale="log", xlabel="measured step, ms", ylabel="predicted - measured, %")
    _plain(panel.xaxis)
    picture.legend(loc="outside right upper")
    return picture
