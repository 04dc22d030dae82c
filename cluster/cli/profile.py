"""`diptych profile`: measures step, transfer and call times, for `diptych simulate` and `diptych plan`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.launch import private
from cluster.cli.lifetime import run, running_cluster
from cluster.cli.options import OUTPUT_FILE, GroupedCommand, client_options
from cluster.cli.screen import console, progress_bar, say
from cluster.cli.serve import check_pools
from diptych.access import Access

if TYPE_CHECKING:
    from workers.profiles.measured import ClusterProfile


@click.command(cls=GroupedCommand)
@client_options
@click.option("-f", "--file", metavar="YAML", help="Start this cluster, measure it, and stop it.")
@click.option("--runtime", type=click.Choice(["ray", "local"]), default="ray", help="With -f.")
@click.option("-o", "--output", type=OUTPUT_FILE, default="profile.json", help="Output file.")
@click.option("--rounds", type=click.IntRange(1, 20), default=3, help="Measurements of every step.")
def profile(endpoint: str, access: Access, file: str | None, runtime: str, output: Path, rounds: int) -> None:
    """Measure the workers of an idle cluster and fit a cost model to each pool.

    Takes some minutes on CPUs. Requests are served first: a worker that has work is not measured.

    \b
    Example:
      diptych profile -f examples/laptop.yaml -o laptop-profile.json
    """
    from workers.profiles.measured import save

    found = asyncio.run(_measure(endpoint, access, rounds)) if file is None else _measure_file(file, runtime, rounds)
    save(found, output)
    _show(found)
    say(f"written: {output}")


def _measure_file(file: str, runtime: str, rounds: int) -> "ClusterProfile":
    from cluster.spec_file import load_spec

    spec = private(load_spec(file))
    spec.check_one_model("a profile")
    check_pools(spec, file, runtime)

    async def measured() -> "ClusterProfile":
        async with running_cluster(spec, runtime, say) as serving:
            return await _measure(serving.endpoint, Access(api_key=""), rounds)

    return run(measured())


async def _measure(endpoint: str, access: Access, rounds: int) -> "ClusterProfile":
    from cluster.offline.profile.measure import measure
    from diptych.client import AsyncClient

    with progress_bar() as progress:
        async with AsyncClient(endpoint, access=access) as client:
            return await measure(client, progress, rounds)


def _show(found: "ClusterProfile") -> None:
    screen = console()
    screen.print(f"cluster {found.cluster}, model {found.model}; {found.machine}", markup=False)
    for pool in found.pools:
        cost, error = pool.cost, pool.error
        weights = f", at least {cost.weights_s * 1e3:.2f} ms for its tokens" if cost.weights_s else ""
        large = f" (beyond {cost.large_step_tokens:g} in a step {cost.large_token_s * 1e3:.3f} ms more)"
        screen.print(
            f"{pool.pool}: step {cost.step_s * 1e3:.2f} ms{weights}, "
            f"+ {cost.prefill_token_s * 1e3:.3f} ms per prompt token{large if cost.large_token_s else ''}, "
            f"+ {cost.decode_row_s * 1e3:.3f} ms per decode, + {cost.decode_context_s * 1e6:.2f} us per context token; "
            f"error on {error.points} held-out steps: median {error.median:.1%}, maximum {error.greatest:.1%}; "
            f"gap between steps {pool.gap_s * 1e3:.2f} ms, call {pool.call_s * 1e3:.2f} ms",
            markup=False,
        )
    for link in found.links:
        speed = f"{link.bytes_per_s / 1e9:.2f} GB/s, {link.latency_s * 1e6:.0f} us"
        screen.print(f"{link.owner} -> {link.reader}: {link.transport}, {speed}", markup=False)
    for each in found.interference:
        screen.print(f"{each}: steps take {each.ratio:.2f} times as long", markup=False)
