"""`make sim-vs-real`: profile a real cluster, run a small load on it, and compare the simulator with the results."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import click

from benchmarks.hosted import hosted, refuse_foreign_ray
from benchmarks.sim_vs_real import page, record
from benchmarks.sim_vs_real.compare import compare, compared, mean_rows
from benchmarks.sim_vs_real.systems import KINDS, SYSTEMS, capacity, slo_for, workload
from cluster.offline.load.grpc_endpoint import drive_cluster
from cluster.offline.load.sender import LoadOptions
from cluster.offline.profile.measure import ROUNDS, measure
from cluster.offline.scoring.figures import figures
from cluster.offline.workload.arrivals import Workload
from cluster.spec import ClusterSpec
from diptych.client import AsyncClient
from workers.profiles.measured import ClusterProfile

Cell = tuple[str, float, int]  # kind of requests, load, seed
LOADS = (0.6,)
RUNS = 5  # of a cell, with different seeds
ANSWERS = 9  # in a run
DEADLINE_S = 240.0
DOCS = Path(__file__).resolve().parents[2] / "docs"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("systems", nargs=-1, type=click.Choice(tuple(SYSTEMS)))
@click.option("--load", "loads", type=click.FloatRange(0.05, 2.0), multiple=True, help="Shares of capacity (0.6).")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Kinds of requests (all).")
@click.option("--runs", type=click.IntRange(1, 20), default=RUNS, show_default=True, help="With different seeds.")
@click.option("--answers", type=click.IntRange(5, 1000), default=ANSWERS, show_default=True, help="In a run.")
@click.option("--rounds", type=click.IntRange(1, 20), default=ROUNDS, show_default=True, help="Of the profile.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--keep-profile", is_flag=True, help="Use the recorded profile instead of measuring one.")
@click.option("--recorded", is_flag=True, help="Run nothing: simulate the recorded runs again.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing: how many figures of the recorded runs the real runs of this record meet, and the simulator.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=DOCS, help="Write here (docs/).")
@click.option("--record", "file", type=click.Path(dir_okay=False, path_type=Path), default=record.FILE)
def main(
    systems: tuple[str, ...],
    loads: tuple[float, ...],
    kinds: tuple[str, ...],
    runs: int,
    answers: int,
    rounds: int,
    seed: int,
    keep_profile: bool,
    recorded: bool,
    against: Path | None,
    out: Path,
    file: Path,
) -> None:
    """Run the same requests on the real cluster and in the simulator. All of it takes about 25 minutes on two idle
    cores; a single cell, such as `ours --kind shift --runs 1`, takes minutes.

    Runs of other systems, kinds and loads stay as they were recorded. Timings decide no exit status.
    """
    if recorded and (systems or keep_profile):
        raise click.UsageError("--recorded runs nothing; omit the systems and --keep-profile")
    found = record.load(file) if file.exists() else record.Recorded({}, ())
    if against is not None:
        _second_run(found, record.load(against))
        return
    if not recorded:
        refuse_foreign_ray(dict(os.environ))
        for name in systems or tuple(SYSTEMS):
            known = found.profiles.get(name) if keep_profile else None
            if keep_profile and known is None:
                raise click.UsageError(f"{name} has no recorded profile; omit --keep-profile")
            cells = tuple(product(kinds or KINDS, loads or LOADS, range(seed, seed + runs)))
            profile, measured = _run(SYSTEMS[name], known, cells, answers, rounds)
            found = _merged(found, name, profile, measured, fresh=known is None)
            record.save(found, file)
    comparisons = [compare(real, found.profiles[real.system]) for real in found.runs]
    text = page.section(found, comparisons)
    click.echo(text)
    click.echo(f"written: {page.write(text, out)}, {file}", err=True)


def _second_run(found: record.Recorded, again: record.Recorded) -> None:
    """Print by cell how many figures a second real run of the same requests meets, and how many the simulator."""
    second = {(run.cell, run.seed): run for run in again.runs}
    cells: dict[object, list[record.RealRun]] = {}
    for run in found.runs:
        if second.get((run.cell, run.seed), run).seen != run.seen:  # not the same run
            cells.setdefault(run.cell, []).append(run)
    for runs in cells.values():
        pairs = [(real, second[real.cell, real.seed]) for real in runs]
        repeated = mean_rows([compared(real, other.run).rows for real, other in pairs])
        simulated = mean_rows([compare(real, found.profiles[real.system]).rows for real in runs])
        met, by_simulator = (sum(row.met for row in rows) for rows in (repeated, simulated))
        name = f"{runs[0].system}, {runs[0].kind}, at {runs[0].load:.0%}"
        click.echo(f"{name}: of {len(repeated)} figures a second run meets {met}, the simulator {by_simulator}")


def _merged(
    found: record.Recorded, name: str, profile: ClusterProfile, runs: Sequence[record.RealRun], *, fresh: bool
) -> record.Recorded:
    """Add the runs. A new profile replaces the system's older runs, which belong to the old profile."""
    again = {run.cell for run in runs}
    others = [run for run in found.runs if run.system != name or (not fresh and run.cell not in again)]
    order = sorted(
        [*others, *runs],
        key=lambda run: (tuple(SYSTEMS).index(run.system), KINDS.index(run.kind), run.load, run.seed),
    )
    return record.Recorded(found.profiles | {name: profile}, tuple(order))


def _run(
    spec: ClusterSpec, known: ClusterProfile | None, cells: Sequence[Cell], answers: int, rounds: int
) -> tuple[ClusterProfile, list[record.RealRun]]:
    """Raises `ProcessFailed`, `DiptychError`, `ProfileError`."""
    _tell(f"starting {spec.name}")
    with hosted([spec]) as system:
        endpoint = system.endpoints[spec.name]
        profile = known or asyncio.run(_profile(endpoint, rounds))
        # The simulator needs an event loop of its own, so it runs between the real ones.
        rates = {kind: capacity(profile, spec, answers, 0, kind) for kind in dict.fromkeys(kind for kind, *_ in cells)}
        for kind, rate in rates.items():
            _tell(f"{spec.name} gives at most {rate:.2f} answers/s of {kind}, by simulation")
        runs = []
        for number, cell in enumerate(cells, 1):
            kind, load, seed = cell
            sent = workload(spec.name, answers, load * rates[kind], seed, number, kind)
            runs.append(asyncio.run(_real(endpoint, spec, profile, cell, sent)))
    return profile, runs


async def _profile(endpoint: str, rounds: int) -> ClusterProfile:
    async with AsyncClient(endpoint) as client:
        return await measure(client, lambda what, done, total: _tell(what) if done <= 1 else None, rounds)


async def _real(
    endpoint: str, spec: ClusterSpec, profile: ClusterProfile, cell: Cell, requested: Workload
) -> record.RealRun:
    answers, (kind, load, seed) = len(requested.arrivals), cell
    _tell(f"{spec.name}, {kind}, at {load:.0%}, seed {seed}: {answers} answers, in {requested.duration_s:.0f} s")
    slo = slo_for(profile, spec)
    sent = LoadOptions(profile.vocab_size, DEADLINE_S, answers, seed=seed, system=spec.name)
    async with AsyncClient(endpoint) as client:
        roles = {worker.name: worker.role.value for worker in (await client.status()).view.workers}
        run = await drive_cluster(client, requested, sent)
    return record.recorded(run, dict(figures(run, slo).phases_s), load, slo, requested, kind, roles)


_tell = partial(click.echo, err=True)


if __name__ == "__main__":
    main()
