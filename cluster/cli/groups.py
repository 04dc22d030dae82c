"""Options in groups for `--help`."""

from collections.abc import Callable
from typing import Any

import click

GENERAL = "Options"


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
