"""Tables, summary lines and pictures of configurations compared over seeds, with confidence intervals."""

from collections.abc import Iterator
from typing import Any

from cluster.offline.report.style import GRAY, GREEN, RED, legend, look, panels, styled
from cluster.offline.report.table import NOTHING, Grid
from cluster.offline.scoring.trials import METRICS, Interval, Metric, PairedDifference, Trials, TrialVerdict

SHOWN = (
    "TTFT and TPOT attainment",
    "TTFT and worst-TBT attainment",
    "TTFT p50",
    "TTFT p99",
    "TPOT p99",
    "TBT p50",
    "TBT p99",
    "TBT max",
)
SHADES = {TrialVerdict.BETTER: GREEN, TrialVerdict.WORSE: RED, TrialVerdict.EVEN: GRAY}


def trial_tables(trials: Trials) -> Iterator[Grid]:
    """For each load: every configuration's figures, then each split one against the best colocated one."""
    for load in trials.loads:
        seeds = f"{len(trials.seeds)} seeds" if len(trials.seeds) > 1 else "one seed, so no interval"
        yield Grid(
            f"{load}: means over {seeds}, 95 % confidence intervals (Student's t); * marks the best mean",
            ("", *trials.configurations),
            tuple(_figures(trials, metric, load) for metric in METRICS),
        )
        others = [name for name in trials.configurations if _compared(trials, name)]
        if others:
            yield Grid(
                f"{load}: each against the best colocated configuration by this figure, seed by seed; "
                "x for ratios, points for shares, 95 % confidence intervals",
                ("", "best colocated", *others),
                tuple(_against(trials, metric, load, others) for metric in METRICS),
            )


def _compared(trials: Trials, name: str) -> bool:
    return bool(trials.colocated) and name in trials.split


def _figures(trials: Trials, metric: Metric, load: str) -> tuple[str, ...]:
    best = trials.best(metric, load, trials.configurations)
    cells = []
    for name in trials.configurations:
        found = trials.mean(metric, name, load)
        cells.append(NOTHING if found is None else _interval_text(found, metric) + ("*" if name == best else ""))
    return (f"{metric.name}, {metric.unit}", *cells)


def _interval_text(found: Interval, metric: Metric) -> str:
    mean = f"{found.mean * metric.factor:.3g}"
    if found.seeds < 2:
        return mean
    return f"{mean} ({found.low * metric.factor:.3g}..{found.high * metric.factor:.3g})"


def _against(trials: Trials, metric: Metric, load: str, others: list[str]) -> tuple[str, ...]:
    cells = []
    for name in others:
        found = trials.against_best(metric, name, load)
        cells.append(NOTHING if found is None else f"{by_text(found, metric)}\n{found.verdict.value}")
    return (metric.name, trials.best(metric, load, trials.colocated) or NOTHING, *cells)


def by_text(found: PairedDifference, metric: Metric, *, sure: bool = True) -> str:
    """`0.31x (0.28..0.35)`, or for shares `+12 points (5..19)`."""
    by = found.by
    if metric.is_share:
        text = f"{100 * by.mean:+.3g} points"
        bounds = f" ({100 * by.low:+.3g}..{100 * by.high:+.3g})"
    else:
        text, bounds = f"{by.mean:.3g}x", f" ({by.low:.3g}..{by.high:.3g})"
    return text + bounds if sure and by.seeds > 1 else text


def summary_lines(trials: Trials) -> Iterator[str]:
    """A line for each load and split configuration: which figures it wins and loses."""
    for load in trials.loads:
        for name in trials.configurations:
            if _compared(trials, name):
                yield f"{load}: {name} against the best colocated one: {_regions(trials, name, load)}"


def _regions(trials: Trials, name: str, load: str) -> str:
    named: dict[TrialVerdict, list[str]] = {verdict: [] for verdict in TrialVerdict}
    for metric in METRICS:
        found = trials.against_best(metric, name, load)
        if found is not None:
            named[found.verdict].append(f"{metric.name} {by_text(found, metric, sure=False)} of {found.other}")
    heads = {TrialVerdict.BETTER: "wins", TrialVerdict.WORSE: "loses", TrialVerdict.EVEN: "no difference"}
    return "; ".join(f"{heads[verdict]}: {', '.join(lines)}" for verdict, lines in named.items() if lines)


@styled
def trial_intervals(trials: Trials) -> Any:
    """Each configuration's means by load, with their confidence intervals."""
    metrics = [metric for metric in METRICS if metric.name in SHOWN]
    columns = 4
    picture, grid = panels(-(-len(metrics) // columns), columns, 13.0, 6.4)
    for panel, metric in zip(grid.flat, metrics, strict=True):
        for number, name in enumerate(trials.configurations):
            off = 0.6 * ((number + 0.5) / len(trials.configurations) - 0.5)
            for place, load in enumerate(trials.loads):
                if (found := trials.mean(metric, name, load)) is not None:
                    values = [metric.factor * each for each in (found.mean, found.low, found.high)]
                    errors = [[values[0] - values[1]], [values[2] - values[0]]]
                    style = look(number)
                    panel.errorbar(
                        place + off, values[0], yerr=errors, capsize=3, linestyle="", markersize=5, label=name, **style
                    )
        panel.set_xticks(range(len(trials.loads)), trials.loads, fontsize=7)
        panel.set_xlim(-0.5, len(trials.loads) - 0.5)
        panel.set_ylim(0.0, 105.0 if metric.is_share else None)
        panel.grid(axis="x", visible=False)
        panel.set_title(f"{metric.name}, {metric.unit}" + ("\n(more is better)" if metric.more_is_better else ""))
    legend(picture, grid.flat[0], ncols=len(trials.configurations))
    return picture


@styled
def verdict_map(trials: Trials) -> Any:
    """By which figures each split configuration beats the best colocated one or loses to it."""
    columns = [(name, load) for name in trials.configurations if _compared(trials, name) for load in trials.loads]
    picture, ((panel,),) = panels(1, 1, 3.6 + 1.9 * len(columns), 1.4 + 0.36 * len(METRICS))
    for row, metric in enumerate(METRICS):
        for column, (name, load) in enumerate(columns):
            found = trials.against_best(metric, name, load)
            if found is None:
                continue
            panel.barh(row, 0.94, left=column - 0.47, height=0.9, color=SHADES[found.verdict], alpha=0.45)
            text = f"{by_text(found, metric, sure=False)} of {found.other}"
            panel.text(column, row, text, ha="center", va="center", fontsize=7.5)
    panel.set_yticks(range(len(METRICS)), [metric.name for metric in METRICS])
    panel.set_xticks(range(len(columns)), [f"{name}\n{load}" for name, load in columns])
    panel.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(METRICS) - 0.5, -0.5))
    panel.grid(visible=False)
    panel.set_title("Relative to the best colocated: green better, orange worse, gray no clear difference")
    return picture


def has_verdicts(trials: Trials) -> bool:
    """Whether there are a colocated and a split configuration to compare."""
    return any(_compared(trials, name) for name in trials.configurations)
