"""`diptych models`: what can be served from here, and what is here already."""

from dataclasses import asdict

import click

from cluster.cli.screen import print_json, progress_bar, size


@click.group()
def models() -> None:
    """List, fetch and look into models.

    \b
    Example:
      diptych models pull smollm2-135m
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of lines.")
def list_command(as_json: bool) -> None:
    """Models known by name, and those already on this machine.

    \b
    Example:
      diptych models list --json
    """
    from workers.model.store import list_models

    listings = list_models()
    if as_json:
        print_json([asdict(each) | {"path": None if each.path is None else str(each.path)} for each in listings])
        return
    for each in listings:
        here = f"here, {size(each.num_bytes)}" if each.path else "not here yet"
        click.echo(f"{each.name:24} {here:18} {each.description}")


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch model NAME now: a short name, or owner/name on the hub.

    \b
    Example:
      diptych models pull smollm2-135m
    """
    from workers.model.store import pull as pull_model

    with progress_bar() as progress:
        summary = pull_model(name, progress)
    click.echo(f"{summary.name}: {summary.num_parameters / 1e6:.0f} M parameters in {summary.path}")


@models.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def inspect(name: str, as_json: bool) -> None:
    """Show the shape of model NAME: a short name, a .gguf file, a folder, or owner/name.

    \b
    Example:
      diptych models inspect smollm2-135m --json
    """
    from workers.model.store import inspect as inspect_model

    with progress_bar() as progress:
        summary = inspect_model(name, progress)
    told = asdict(summary) | {"path": str(summary.path)}
    if as_json:
        print_json(told)
        return
    shape = told.pop("config")
    for key, value in (told | shape).items():
        click.echo(f"{key:18} {value}")
