"""The campaign's command line."""

import click

from cluster.bench.elastic import one
from cluster.bench.elastic.contenders import COLOCATED, SPLIT, Contender, View
from cluster.bench.elastic.probe import Probe
from cluster.bench.elastic.scenarios import SCENARIOS, Absent, Size, scenario
from cluster.sim.systems import SYSTEMS
from cluster.spec import SpecError

PLAIN = {"split": SPLIT, "colocated": COLOCATED}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--one", "which", type=click.Choice(list(SCENARIOS)), help="One run of this workload, told in full.")
@click.option(
    "--system",
    "who",
    default="ours",
    show_default=True,
    help=f"With --one: {', '.join(SYSTEMS)}; or a static configuration, split:PREFILLS[:CHUNK] or colocated[:CHUNK].",
)
@click.option("--scale", default=0.6, show_default=True, help="With --one: the load as a share of the fleet's seconds.")
@click.option("--seed", default=0, show_default=True)
@click.option("--workers", default=Size().workers, show_default=True)
@click.option("--stretch", default=1.0, show_default=True, help="All phases so many times as long.")
@click.option("--heartbeat", default=0.0, help="With --one: seconds between a worker's words [the fleet's own].")
@click.option("--call", default=0.0, help="With --one: seconds of a call to a worker.")
@click.option("--gateways", default=1, show_default=True, help="With --one: so many share the requests.")
@click.option("--json", "as_json", is_flag=True, help="With --one: as a line of JSON.")
def main(
    which: str | None,
    who: str,
    scale: float,
    seed: int,
    workers: int,
    stretch: float,
    heartbeat: float,
    call: float,
    gateways: int,
    as_json: bool,
) -> None:
    """Goodput under loads that shift: ours against every system, every static split, colocated, and an oracle.

    For tuning, one run in seconds:

    \b
      python -m cluster.bench.elastic --one phases-a100 --system ours --scale 0.6
      python -m cluster.bench.elastic --one day --system split:2:2048 --scale 0.5
    """
    size = Size(workers, stretch)
    try:
        if which is not None:
            made = scenario(which, size)
            probe = Probe(contender(who), made, None, View(heartbeat, call, gateways))
            run = probe.run(scale, seed)
            click.echo(one.as_json(run, made, scale) if as_json else "\n".join(one.lines(run, made, scale)))
    except (Absent, SpecError) as error:
        raise click.ClickException(str(error)) from None


def contender(text: str) -> Contender:
    """Raises `SpecError`."""
    head, *rest = text.split(":")
    if head not in PLAIN:
        return Contender(text)
    wanted = ("PREFILLS", "CHUNK") if head == "split" else ("CHUNK",)
    if len(rest) > len(wanted) or (head == "split" and not rest) or not all(part.isdecimal() for part in rest):
        raise SpecError(f"{text!r} is no configuration; write split:2, split:2:2048, colocated or colocated:512")
    numbers = [int(part) for part in rest]
    prefills = numbers.pop(0) if head == "split" else 0
    return Contender(PLAIN[head], prefills, numbers[0] if numbers else 2048 if prefills else 512, plain=True)


if __name__ == "__main__":
    main(prog_name="python -m cluster.bench.elastic")
