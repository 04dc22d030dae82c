"""The command line of the batching study: measure, compute the grid, write page, table and pictures."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks.study import page, pictures, real, record, steps
from benchmarks.study.cells import grid
from benchmarks.study.record import Measured
from cluster.offline.load import machine
from workers.costs import LinearCost
from workers.profiles.fit import fit

MODEL = "smollm2-135m"
PARTS = ("steps", "naive", "real")
NOTHING = Measured("", "", "", real.THREADS, LinearCost(), ())
DOCS = Path(__file__).resolve().parents[2] / "docs"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--fitted", is_flag=True, help="Measure nothing: page and pictures from the committed measurements.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=DOCS, help="Write here (docs/).")
def main(parts: tuple[str, ...], fitted: bool, out: Path) -> None:
    """Compare the batching policies: steps are measured on the real model, a cost model is fitted to them, and the
    production engine runs in virtual time. Without PARTS, everything is measured; about eight minutes on two cores.
    """
    if fitted and parts:
        raise click.UsageError("--fitted measures nothing; omit the parts")
    if reason := pictures.missing():
        raise click.ClickException(reason)
    if not fitted:
        record.save(asyncio.run(_measure(parts or PARTS, _tell)))
    measured = record.load()
    found = grid(measured.cost, len(machine.allowed_cores()), _tell)
    page.write(out, measured, found)
    pictures.draw(out / "pictures", measured, found)
    click.echo(f"written: {out / page.PAGE}, {out / page.TABLE} and {out / 'pictures'}/batching-*.svg")


def _tell(line: str) -> None:
    click.echo(line, err=True)


async def _measure(parts: Collection[str], progress: Callable[[str], None]) -> Measured:
    """Measure these parts; the others stay as recorded."""
    from workers.executor.rank_loader import open_solo
    from workers.model.store import resolve

    folder = await asyncio.to_thread(resolve, MODEL)
    executor = await open_solo(real.worker_config(MODEL), folder, "study")
    try:
        measured = NOTHING if set(PARTS) == set(parts) else record.load()
        if "steps" in parts:
            points = await steps.measure(executor, progress)
            measured = replace(_machine(measured), points=points, cost=fit(points))
        if "naive" in parts:
            measured = replace(measured, naive=await real.measure_naive(executor, progress))
        if "real" in parts:
            measured = replace(measured, real=await real.measure_cells(executor, measured.cost, progress))
        return measured
    finally:
        await executor.close()


def _machine(measured: Measured) -> Measured:
    """With today's date, this machine and these versions."""
    versions = machine.versions()
    return replace(
        measured,
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{len(machine.allowed_cores())} cores of {machine.cpu_name()}, {machine.system_name()}",
        versions=", ".join(f"{name} {versions[name]}" for name in ("python", "diptych", "torch", "numpy")),
    )


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.study")
