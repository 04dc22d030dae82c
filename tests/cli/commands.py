"""Looks commands of `diptych` up."""

import click

from cluster.cli import main


def command_of(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None, f"diptych has no command {name}"
    return command
