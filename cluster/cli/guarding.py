"""Options of who opens a gateway's doors: files of certificates and API keys."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cluster.spec import ClusterSpec

FILES = (
    ("--tls-cert-file", "The gateway's certificate: TLS at both doors, see docs/security.md."),
    ("--tls-key-file", "Its key."),
    ("--tls-client-ca-file", "Authorities: clients must show a certificate of one of them."),
    ("--api-keys-file", "API keys, one a line: requests must carry one of them."),
)


def guard_options(command: Callable[..., None]) -> Callable[..., None]:
    """What is given comes as keyword arguments, by its name in the specification: for `with_files`."""
    for option, words in reversed(FILES):
        kind = click.Path(dir_okay=False)
        command = click.option(option, type=kind, callback=_absolute, metavar="FILE", help=words)(command)
    return command


def _absolute(ctx: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Links are not followed: one that is turned to another file is a renewal."""
    return None if path is None else os.path.abspath(path)


def with_files(spec: "ClusterSpec", files: Mapping[str, str | None]) -> "ClusterSpec":
    """The files that are given, instead of the specification's. Raises `SpecError`."""
    from cluster.spec import SpecError

    given = {name: path for name, path in files.items() if path is not None}
    try:
        return replace(spec, gateway=replace(spec.gateway, **given))  # type: ignore[arg-type]
    except ValueError as error:
        raise SpecError(f"gateway: {error}") from None
