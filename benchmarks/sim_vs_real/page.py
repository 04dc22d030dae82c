"""The comparison as a table on the terminal and between two marks in docs/simulator.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.sim_vs_real.compare import Comparison, Row, mean_rows
from benchmarks.sim_vs_real.record import RealRun, Recorded
from cluster.offline.scoring.figures import slo_text
from workers.profiles.measured import ClusterProfile

PAGE = "simulator.md"
BEGIN, END = "<!-- sim-vs-real: begin -->", "<!-- sim-vs-real: end -->"


def rows(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """(figure, real, simulated, error, target, verdict)."""
    return [
        (
            row.metric,
            _figure(row, row.real),
            _figure(row, row.simulated),
            _error(row),
            f"{row.target:.0%}",
            _verdict(row),
        )
        for row in found
    ]


def _verdict(row: Row) -> str:
    return "met" if row.met else "**missed**"


def _figure(row: Row, value: float | None) -> str:
    if value is None:
        return "none"
    if row.metric == "goodput":
        return f"{value:.3f} req/s"
    return f"{value:.3f} s" if row.metric.startswith("TTFT") else f"{value * 1e3:.1f} ms"


def _error(row: Row) -> str:
    if row.error is None:
        return "none"
    return f"{row.error:+.1%}" if row.met else f"**{row.error:+.1%}**"


def section(found: Recorded, comparisons: Sequence[Comparison]) -> str:
    """Markdown: the profiles, and a table for each cell, with means over its runs."""
    blocks = [_where(found.profiles)]
    cells: dict[object, list[tuple[RealRun, Comparison]]] = {}
    for real, comparison in zip(found.runs, comparisons, strict=True):
        cells.setdefault(real.cell, []).append((real, comparison))
    for runs in cells.values():
        real, comparison = runs[0]
        several = f"means of {len(runs)} runs; the first: " if len(runs) > 1 else ""
        head = (
            f"**{comparison.name} of its capacity**: {several}{len(real.seen)} requests, {real.workload.rate:.2f} a "
            f"second, SLO {slo_text(real.slo)}, attainment {comparison.real.attainment.both:.0%} real and "
            f"{comparison.simulated.attainment.both:.0%} simulated. Median error of a single request: TTFT "
            f"{comparison.each_ttft:.1%}, TPOT {comparison.each_tpot:.1%}."
        )
        table = ["| figure | real | simulated | error | target | |", "|---|---|---|---|---|---|"]
        table += [f"| {' | '.join(row)} |" for row in rows(mean_rows([each.rows for _, each in runs]))]
        blocks += [head, "\n".join(table)]
    return "\n\n".join(blocks)


def _where(profiles: Mapping[str, ClusterProfile]) -> str:
    lines = []
    for name, profile in profiles.items():
        fits = ", ".join(
            f"{pool.pool} {pool.error.median:.1%} (maximum {pool.error.greatest:.1%})" for pool in profile.pools
        )
        slowdowns = ", ".join(f"{each} {each.ratio:.2f}" for each in profile.interference) or "none"
        lines.append(
            f"- {name}: {profile.model}, profiled {profile.date[:10]} on {profile.machine} ({profile.versions}); "
            f"median error of the fit on held-out steps: {fits}; slowdown by neighbors: {slowdowns}; "
            f"between steps {profile.pools[-1].gap_s * 1e3:.1f} ms, a call {profile.pools[-1].call_s * 1e3:.1f} ms, "
            f"the frontend {profile.frontend_s * 1e3:.1f} ms."
        )
    return "\n".join(lines)


def write(text: str, folder: Path) -> Path:
    """Put the section between the marks of the page; a page without marks gets them at its end. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / PAGE
    page = file.read_text() if file.exists() else "# The simulator\n"
    before, begin, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not begin:
        before, after = page.rstrip("\n") + "\n\n## Against the real cluster\n\n", "\n"
    file.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    return file
