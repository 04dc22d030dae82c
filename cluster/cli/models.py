"""`diptych models`: lists, downloads and inspects models."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cluster.cli.screen import print_json, progress_bar, size

if TYPE_CHECKING:
    from workers.model.store import ModelSummary


@click.group()
def models() -> None:
    """List, download and inspect models.

    \b
    Example:
      diptych models pull smollm2-135m
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of lines.")
def list_command(as_json: bool) -> None:
    """List models known by name, and those already on this machine.

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
        here = f"local, {size(each.num_bytes)}" if each.path else "not downloaded"
        click.echo(f"{each.name:24} {here:18} {each.description}")


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Download model NAME: a short name, or owner/name on the hub.

    \b
    Example:
      diptych models pull smollm2-135m
    """
    from workers.model.store import inspect as inspect_model

    with progress_bar() as progress:
        summary = inspect_model(name, progress)
    click.echo(f"{summary.name}: {summary.num_parameters / 1e6:.0f} M parameters in {summary.path}")


@models.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def inspect(name: str, as_json: bool) -> None:
    """Show the shape of model NAME: a short name, a .gguf file, a folder, or owner/name.

    \b
    Example:
      diptych models inspect smollm2-135m --json
    """
    from workers.model.store import inspect as inspect_model

    with progress_bar() as progress:
        summary = inspect_model(name, progress)
    if as_json:
        print_json(asdict(summary) | {"path": str(summary.path)})
        return
    for key, value in inspected(summary):
        click.echo(f"{key:18} {value}")


def inspected(summary: "ModelSummary") -> list[tuple[str, str]]:
    """The main facts; --json has all facts."""
    config = summary.config
    windows = sum(layer.window > 0 for layer in config.layers)
    chunked = sum(layer.window < 0 for layer in config.layers)
    layers = f"{len(config.layers)}{f', {windows} with a sliding window' if windows else ''}"
    layers += f", {chunked} with chunked attention" if chunked else ""
    kv = "one latent for K and V" if config.latent else f"{config.num_kv_heads} of KV"
    stated = {name: value for name, value in asdict(config.generation).items() if value is not None}
    rows = [
        ("name", summary.name),
        ("folder", str(summary.path)),
        ("content id", summary.content_id),
        ("architecture", config.architecture),
        ("parameters", f"{summary.num_parameters / 1e6:,.1f} M, {size(summary.weight_bytes)} as {config.dtype}"),
        ("layers", layers),
        ("hidden, ffn", f"{config.hidden_size}, {config.ffn_size}"),
        ("heads", f"{config.num_heads}, {kv}, {config.head_dim} wide"),
        (
            "vocabulary",
            f"{config.vocab_size:,} tokens; end tokens {', '.join(map(str, config.eos_token_ids)) or 'none'}",
        ),
        ("context", f"{config.context_length:,} tokens"),
        ("sampling", ", ".join(f"{name} {value:g}" for name, value in stated.items()) or "the server's defaults"),
    ]
    if config.experts:
        rows.insert(6, ("experts", f"{config.experts.per_token} of {config.experts.count} for a token"))
    return rows
