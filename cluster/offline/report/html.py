"""A self-contained HTML report: tables, pictures and definitions, without scripts or external links."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from cluster.offline.report.pictures import (
    attainment_curves,
    goodput_bars,
    latency_curves,
    phase_bars,
    request_gantt,
    scatter,
)
from cluster.offline.report.spans import typical
from cluster.offline.report.style import png
from cluster.offline.report.table import NOTHING, Grid, SystemResult, comparison, details, pools, unit_of
from cluster.offline.scoring.figures import DEFINITIONS

TEMPLATE = Path(__file__).with_name("report.html.jinja")


@dataclass(frozen=True, slots=True)
class Picture:
    """`name`: file name without suffix. `draw` returns a matplotlib figure."""

    name: str
    caption: str
    draw: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ExtraContent:
    """Further content of a page: summary lines, tables, pictures."""

    summary: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    pictures: tuple[Picture, ...] = ()


NO_EXTRA = ExtraContent()


def pictures(systems: Sequence[SystemResult]) -> Iterator[Picture]:
    """All pictures for which these systems have data; nothing is drawn yet."""
    if any(system.goodputs for system in systems):
        yield Picture("goodput", f"Goodput per {unit_of(systems)}, by target.", partial(goodput_bars, systems))
        curves = (
            f"Attainment over the rate per {unit_of(systems)}: lines are means of all seeds, dots are single probes."
        )
        yield Picture("attainment", curves, partial(attainment_curves, systems))
    if any(system.sweep for system in systems):
        yield Picture("latency", "Latency over the offered rate.", partial(latency_curves, systems))
    runs = [system.run for system in systems if system.run is not None]
    if runs:
        slo = systems[0].figures.slo
        yield Picture("requests", "TTFT and TPOT of every request, and the SLO.", partial(scatter, runs, slo))
    if any(system.figures.phases_s for system in systems):
        yield Picture("phases", "Where a finished request's time went, on average.", partial(phase_bars, systems))
    for number, run in enumerate(runs):
        for percentile, which in ((50, "median"), (99, "slow")):
            if (served := typical(run, percentile)) is not None:
                caption = f"A {which} request of {run.system}: the {percentile}th percentile of E2E."
                yield Picture(f"request-{number}-p{percentile}", caption, partial(request_gantt, served))


def ran(systems: Sequence[SystemResult]) -> Grid:
    """The workload, seeds, number of GPUs and clock of each system."""
    headers = (
        *("system", "workload", "requests", f"{unit_of(systems)}s", "clock"),
        *("seed", "goodput seeds", "seconds", "wall seconds"),
    )
    return Grid("", headers, tuple(_ran(system) for system in systems))


def _ran(system: SystemResult) -> tuple[str, ...]:
    figures = system.figures
    seeds = sorted({seed for goodput in system.goodputs for seed in goodput.seeds})
    return (
        *(system.name, figures.workload, str(figures.requests), str(figures.gpus), figures.clock, str(figures.seed)),
        ", ".join(map(str, seeds)) or NOTHING,
        f"{figures.seconds:.4g}",
        f"{system.run.wall_s:.3g}" if system.run else NOTHING,
    )


def page(
    title: str,
    systems: Sequence[SystemResult],
    *,
    subtitle: str = "",
    notes: Sequence[str] = (),
    images: Mapping[str, bytes] | None = None,
    extra: ExtraContent = NO_EXTRA,
) -> str:
    """The whole page. Raises ValueError without systems and tables.

    `notes` are listed before those of the runs. `images`: PNGs by picture name, of the pictures to show. None: all are
    drawn, which raises `NoPictures` without matplotlib.
    """
    from jinja2 import Environment, StrictUndefined

    if not systems and not extra.grids:
        raise ValueError("a report needs at least one system")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    of_runs = (note for system in systems for note in system.figures.notes)
    drawn = (*extra.pictures, *pictures(systems))
    shown = (
        (each.caption, png(each.draw()) if images is None else images[each.name])
        for each in drawn
        if images is None or each.name in images
    )
    return environment.from_string(TEMPLATE.read_text()).render(
        title=title,
        subtitle=subtitle,
        verdict=verdict(systems),
        ran=ran(systems) if systems else None,
        notes=list(dict.fromkeys((*notes, *of_runs))),
        goodputs=[f"{system.name}: {goodput.summary}" for system in systems for goodput in system.goodputs],
        summed=extra.summary,
        found=extra.grids,
        grids=[grid for grid in (comparison(systems), details(systems), pools(systems)) if grid.rows],
        pictures=[{"caption": caption, "base64": b64encode(image).decode()} for caption, image in shown],
        definitions=DEFINITIONS,
    )


def verdict(systems: Sequence[SystemResult]) -> str:
    """By goodput at the highest target that all systems have, else by SLO attainment at the main load."""
    if not systems:
        return ""
    targets = set.intersection(*({goodput.target for goodput in system.goodputs} for system in systems))
    return _by_goodput(systems, max(targets)) if targets else _by_attainment(systems)


def _by_goodput(systems: Sequence[SystemResult], target: float) -> str:
    found = [(system.name, each) for system in systems for each in system.goodputs if each.target == target]
    (name, best), *others = sorted(found, key=lambda each: each[1].per_gpu, reverse=True)
    share = f"{100 * target:g} % of requests within their SLOs"
    if not best.rate:
        return f"No system keeps {share} at any rate that was tried."
    carries = f"{name} carries {best.per_gpu:.3g} requests/s per {unit_of(systems)} with {share}"
    if not others:
        return f"{carries}."
    second, other = others[0]
    if not other.rate:
        return f"{carries}; no other system does at any rate that was tried."
    doubt = "; the 95 % intervals overlap" if best.low / best.gpus <= other.high / other.gpus else ""
    return f"{carries}, {best.per_gpu / other.per_gpu:.2f} times as many as {second}, the next{doubt}."


def _by_attainment(systems: Sequence[SystemResult]) -> str:
    best, *others = sorted(systems, key=attrgetter("figures.attainment.both"), reverse=True)
    meets = f"{best.name} meets the SLOs of {_share(best)} of the requests"
    return f"{meets}, {others[0].name}, the next, of {_share(others[0])}." if others else f"{meets}."


def _share(system: SystemResult) -> str:
    return f"{100 * system.figures.attainment.both:.1f} %"
