"""A report as tables on a terminal and as Markdown."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.figures import BenchmarkClaim, BenchmarkPart, BenchmarkReport, grids
from cluster.offline.report.table import Grid

if TYPE_CHECKING:
    from rich.console import Console


def show(part: BenchmarkPart, console: "Console") -> None:
    """Print one part."""
    from rich import box
    from rich.table import Table

    console.print(f"\n[bold]{part.name}[/] in {part.seconds:.0f} s")
    for grid in grids(part.figures):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=grid.title, title_justify="left")
        for index, header in enumerate(grid.headers):
            table.add_column(header, justify="right" if index else "left")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
    for claim in part.claims:
        console.print(str(claim), style="green" if claim.met else "red", markup=False, soft_wrap=True)
    for line in _remarks(part):
        console.print(line, markup=False, soft_wrap=True)


def summary(report: BenchmarkReport) -> str:
    """The last line: how many claims are met."""
    claims = [claim for part in report.parts for claim in part.claims]
    if not claims:
        return "no claim was tested"
    return f"{len(claims) - len(report.unmet)} of {len(claims)} claims hold"


def markdown(report: BenchmarkReport) -> str:
    return "\n".join(_markdown(report)) + "\n"


def _markdown(report: BenchmarkReport) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    load = " and ".join("/".join(f"{each:.2f}" for each in loads) for loads in (report.load_before, report.load_after))
    yield f"Taken {report.date} on {report.machine}: {report.cores} cores of {report.cpus}, "
    yield f"{report.memory_bytes / 2**30:.0f} GiB; load average before and after {load}. {versions}."
    yield f"Medians of {report.rounds or 'several'} rounds, least and greatest in brackets."
    for part in report.parts:
        yield f"\n## {part.name}"
        for grid in grids(part.figures):
            yield from _table(grid)
        if part.claims:
            yield ""
            yield from (_item(claim) for claim in part.claims)
        if remarks := _remarks(part):
            yield ""
            yield " ".join(remarks)


def _table(grid: Grid) -> Iterator[str]:
    yield f"\n**{grid.title}**\n"
    yield _row(grid.headers)
    yield _row(["---", *["---:"] * (len(grid.headers) - 1)])
    yield from (_row(row) for row in grid.rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _item(claim: BenchmarkClaim) -> str:
    return f"- {'**' if not claim.met else ''}{claim.verdict}{'**' if not claim.met else ''}: {claim.text}"


def _remarks(part: BenchmarkPart) -> list[str]:
    remarks = list(part.notes)
    if part.skipped:
        remarks.insert(0, f"Skipped: {part.skipped}")
    if part.failed:
        remarks.insert(0, f"Failed: {part.failed}")
    return remarks
