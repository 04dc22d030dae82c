"""SLO attainment far below, near and at what Diptych can bear, beside static choices and its own router.

    python -m benchmarks.elastic.attained [WORKLOAD]...

Loads are shares of Diptych's goodput in the campaign's record; of `prefixes`, which nothing was tuned on, shares of the
fleet's capacity. Where Diptych attains 100 %, nothing attains more, so the others are not simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks.elastic import record
from benchmarks.elastic.contenders import OURS, WITH_ADMISSION, Contender, contender_named
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.scenarios import SCENARIOS, ScenarioSize, scenario
from cluster.offline.scoring.goodput import Map
from cluster.offline.sim.compare import processes

LOADS = (0.3, 0.6, 0.9)  # of the goodput
HELD_OUT, SCALES = "prefixes", (0.6, 0.9, 1.2)  # of the fleet's capacity
HELD_OUT_STATICS = ("split 3, chunk 1024", "colocated, chunk 1024")
MIXED = "colocated, chunk 1024"
BELOW = 0.01  # more than this below another is a loss
SIZE = ScenarioSize(workers=4)
PAGE = Path(__file__).resolve().parents[1] / "results" / "attainment.md"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One workload at one load. `rate`: requests per second."""

    workload: str
    load: float
    rate: float
    others: tuple[Contender, ...]


Run = tuple[LoadPoint, Contender]


def cells(found: record.Record, names: Sequence[str]) -> Iterator[LoadPoint]:
    known = {each.scenario: each for each in found.results}
    for name in names:
        result = known.get(name)
        ours = result.of(record.OURS) if result else None
        statics: tuple[str, ...] = HELD_OUT_STATICS
        if result is not None:
            statics = tuple(best.name for kind in record.STATIC if (best := result.of(kind)) is not None)
        full_rate = ours.rate if ours else scenario(name, SIZE).rate
        alone = tuple(f"{WITH_ADMISSION} on {each}" for each in (statics[0], MIXED))
        for load in LOADS if ours else SCALES:
            yield LoadPoint(name, load, load * full_rate, tuple(map(contender_named, (*statics, *alone))))


def attained(cell: LoadPoint, contender: Contender, seed: int) -> float:
    return ScenarioProbe(contender, scenario(cell.workload, SIZE), give_up=None)(cell.rate, seed).both


def row(cell: LoadPoint, shares: Sequence[float]) -> str:
    """A line of the table: our share, those of `cell.others` if any, and by how much we are below the best of them."""
    ours, *others = shares
    texts = [f"{100 * each:.1f}" for each in others] or ["-"] * len(cell.others)
    best = max(others, default=ours)
    verdict = f"**{100 * (best - ours):.1f} below**" if best - ours > BELOW else "yes"
    names = ", ".join(each.name for each in cell.others[:2])
    return f"| {cell.workload} | {cell.load:g} | {100 * ours:.1f} | {' | '.join(texts)} | {verdict} | {names} |"


HEAD = """\
| workload | load | Diptych | best split | best colocated | its router, that split | its router, mixed workers | \
at most 1 below | the best static choices |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |"""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...", type=click.Choice(list(SCENARIOS)))
@click.option("--all", "all_of_them", is_flag=True, help="Simulate the others where Diptych attains 100 %, too.")
@click.option("--seed", default=0, show_default=True)
@click.option("--processes", "count", type=click.IntRange(1, 64), default=2, show_default=True)
def main(workloads: tuple[str, ...], all_of_them: bool, seed: int, count: int) -> None:
    """SLO attainment of all workloads; without WORKLOAD, written to benchmarks/results/attainment.md."""
    chosen = list(cells(record.load(), workloads or tuple(SCENARIOS)))
    with processes(count) as each:
        ours = _simulated([(cell, OURS) for cell in chosen], seed, each)
        runs = [(cell, other) for cell in chosen for other in cell.others if ours[cell, OURS] < 1.0 or all_of_them]
        found = ours | _simulated(runs, seed, each)
    rows = [row(cell, [found[cell, one] for one in (OURS, *cell.others) if (cell, one) in found]) for cell in chosen]
    click.echo("\n".join((HEAD, *rows)))
    if not workloads:
        PAGE.write_text(page(rows, seed))


def _simulated(runs: Sequence[Run], seed: int, each: Map) -> dict[Run, float]:
    """Attainment by run. Each is printed as soon as it is known."""
    found = {}
    shares = each(attained, [cell for cell, _ in runs], [one for _, one in runs], [seed] * len(runs))
    for (cell, one), share in zip(runs, shares, strict=True):
        click.echo(f"{cell.workload} at {cell.load:g}, {one.name}: {share:.1%}", err=True)
        found[cell, one] = share
    return found


def page(rows: Sequence[str], seed: int) -> str:
    today = datetime.now(UTC).date().isoformat()
    return f"""# SLO attainment by load

`python -m benchmarks.elastic.attained` writes this page: percent of requests that meet both SLOs, simulated, four
workers, seed {seed}, {today}. A load is a share of Diptych's goodput in [the campaign](elastic-campaign.md); of
`{HELD_OUT}`, conversations with shared prefixes that nothing was tuned on, a share of the fleet's capacity. The static
choices are the campaign's best for that workload. "Its router" is Diptych's router and admission with roles left alone,
on the best split and on four mixed workers with chunks of 1,024 tokens. A dash: not simulated, since Diptych attains
100 %, and nothing attains more.

{HEAD}
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.elastic.attained")
