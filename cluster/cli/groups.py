"""Options in groups for `--help`, and the kinds of options that several commands have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

GENERAL = "Options"
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
PORT = click.IntRange(0, 65535)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
SHARE = click.FloatRange(0.0, 1.0, min_open=True)
KV_LINK = click.Choice(("inter-node", "intra-node"))


class GroupedOption(click.Option):
    """An option that `--help` lists under `group`."""

    def __init__(self, *args: Any, group: str = GENERAL, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group = group


class GroupedCommand(click.Command):
    """Lists options under their groups' headings, in the order of first use."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "group", GENERAL), []).append(record)
        rest = groups.pop(GENERAL, None)
        for name, records in [*groups.items(), *([(GENERAL, rest)] if rest else [])]:
            with formatter.section(name):
                formatter.write_dl(records)


def grouped(group: str) -> Callable[..., Callable[..., Any]]:
    """`click.option` for options of this group."""

    def option(*args: Any, **options: Any) -> Callable[..., Any]:
        return click.option(*args, cls=GroupedOption, group=group, **options)

    return option


def seconds(
    name: str,
    text: str,
    default: float | None = None,
    *,
    least: float | None = None,
    option: Callable[..., Callable[..., Any]] = click.option,
) -> Callable[..., Any]:
    """An option `--NAME` in seconds, which the command gets as `NAME_s`: above 0, or from `least` on."""
    parameter, kind = f"{name.removeprefix('--')}_s", click.FloatRange(min=least or 0.0, min_open=least is None)
    return option(name, parameter, type=kind, default=default, metavar="SECONDS", help=text)
