"""`diptych cache`: tiers of a running cluster's prefix caches, prompts that stay there, and files of cached KV."""

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from cluster.cli.options import JSON, GroupedCommand, client_options, seconds
from cluster.cli.screen import console, plain_table, print_json, progress_bar
from cluster.cli.tiers import tier_problems, tiers_table
from diptych.access import Access

if TYPE_CHECKING:
    from diptych.view import CachedPrompt

POOL = click.option(
    "--pool", default="", show_default=False, help="Only on workers of this pool. [default: all that prefill]"
)
TENANT = click.option(
    "--tenant", default="", show_default=False, help="Whose requests find it; without gateway.share_prefixes."
)
CHAT = click.option("--chat", is_flag=True, help="Prompts are users' messages: apply the model's chat template.")
SHOWN_CHARS = 40


@click.group()
def cache() -> None:
    """Show cache tiers, pin prompts, and verify cache files.

    \b
    Example:
      diptych cache status
    """


@cache.command("status", cls=GroupedCommand)
@client_options
@JSON
def status_command(endpoint: str, access: Access, as_json: bool) -> None:
    """Show what each worker caches on its device, in host memory, on its disk and on a server.

    \b
    Example:
      diptych cache status --endpoint 127.0.0.1:50051
    """
    from diptych.client import Client

    with Client(endpoint, access=access) as client:
        found = client.status().view
    if as_json:
        tiers = ({"sources": each.stats.sources, "tiers": each.stats.tiers} for each in found.workers)
        names = (each.name for each in found.workers)
        return print_json(dict(zip(names, msgspec.to_builtins([*tiers]), strict=True)))
    screen = console()
    screen.print(tiers_table(found))
    for line in tier_problems(found):
        screen.print(line, markup=False)


@cache.command(cls=GroupedCommand)
@click.argument("file", type=click.File(encoding="utf-8"))
@client_options
@seconds("--pin", "Keep them in host memory until this long after their last use.")
@POOL
@TENANT
@CHAT
def warm(
    file: Iterable[str], endpoint: str, access: Access, pin_s: float | None, pool: str, tenant: str, chat: bool
) -> None:
    """Compute the prompts in FILE, one JSON string or text per line, on each worker that prefills.

    Prompts that begin like them then find them cached. "-" reads standard input.

    \b
    Example:
      diptych cache warm system-prompts.txt --pin 86400
    """
    from diptych.client import Client

    prompts = _prompts(file)

    with Client(endpoint, access=access) as client:
        for prompt in prompts:
            warmed = client.warm(prompt, pin_s=pin_s, pool=pool, tenant=tenant, apply_chat_template=chat)
            _tell(prompt, warmed, "tokens cached")


@cache.command(cls=GroupedCommand)
@click.argument("file", type=click.File(encoding="utf-8"), required=False)
@client_options
@POOL
@TENANT
@CHAT
def drop(file: Iterable[str] | None, endpoint: str, access: Access, pool: str, tenant: str, chat: bool) -> None:
    """Unpin the prompts in FILE, or all: they may be evicted from host memory again.

    \b
    Example:
      diptych cache drop
    """
    from diptych.client import Client

    prompts: list[str | None] = [None] if file is None else [*_prompts(file)]

    with Client(endpoint, access=access) as client:
        for prompt in prompts:
            unpinned = client.unpin(prompt, pool=pool, tenant=tenant, apply_chat_template=chat)
            _tell("all pins" if prompt is None else prompt, unpinned, "tokens unpinned")


def _prompts(lines: Iterable[str]) -> list[str]:
    """At least one. A line that begins with a quotation mark is a JSON string. Empty lines do not count."""
    prompts = []
    try:
        numbered = list(enumerate(lines, 1))
    except UnicodeDecodeError as error:
        raise click.ClickException(f"the file of prompts is not UTF-8 text: {error}") from None
    for number, line in numbered:
        text = line.rstrip("\r\n")
        if text.startswith('"'):
            try:
                text = json.loads(text)
            except json.JSONDecodeError as error:
                raise click.ClickException(f"line {number} is no JSON string: {error}") from None
        if text:
            prompts.append(text)
    if not prompts:
        raise click.ClickException("the file of prompts has none; write one in each line")
    return prompts


def _tell(prompt: str, workers: "Iterable[CachedPrompt]", what: str) -> None:
    """Exits with 1 at the first prompt that a worker refused."""
    shown = prompt if len(prompt) <= SHOWN_CHARS else f"{prompt[:SHOWN_CHARS]}..."
    for each in workers:
        click.echo(f"{each.worker}: {each.tokens} {what}: {json.dumps(shown, ensure_ascii=False)}")
        if each.problem:
            raise click.ClickException(f"{each.worker}: {each.problem}")


@cache.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@JSON
def verify(path: Path, as_json: bool) -> None:
    """Compare the digests of all blocks on a disk. PATH: cache.disk.path, or a file there. Workers may be running.

    Exits with 1 if a block is corrupt. A worker ignores slots that are torn or foreign, and a corrupt one is a miss.

    \b
    Example:
      diptych cache verify /var/kv
    """
    from workers.kv_store.verify import SlabReport, find_slabs, verify_slab

    with progress_bar() as progress:
        reports = [verify_slab(each, progress) for each in find_slabs(path)]
    if as_json:
        print_json([asdict(each) for each in reports])
    else:
        names = [each.name for each in fields(SlabReport)]
        table = plain_table(names[0], *(f">{name.replace('_', ' ')}" for name in names[1:]))
        for each in reports:
            table.add_row(*map(str, asdict(each).values()))
        console().print(table)
    if corrupt := sum(each.corrupt for each in reports):
        raise click.ClickException(f"corrupt blocks: {corrupt}; check the disk, and delete the file to start anew")
