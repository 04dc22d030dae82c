"""Options that several commands have, in groups for `--help`: kinds of values, a gateway's address, TLS and API keys.

A key is never an argument, because the shell's history and the process list would show it.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from cluster.cli.local_servers import last_endpoint
from diptych.access import Access

DEFAULT = "[default: $DIPTYCH_ENDPOINT, else the last server started on this machine, else 127.0.0.1:50051]"

GENERAL = "Options"


class OutputPath(click.Path):
    """What a command writes at its end. Refused before its work if that cannot be written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        above = path.parent
        while self.dir_okay and not above.exists():  # the folders that lack are created
            above = above.parent
        try:
            if path.is_file():
                path.open("ab").close()
            elif path.is_dir() or not path.exists():
                tempfile.TemporaryFile(dir=path if path.is_dir() else above).close()
        except OSError as error:
            why = f"cannot be written: {error.strerror}"
            self.fail(f"{path} {why}" if above.is_dir() else f"{above} is not a folder; create it first", param, ctx)
        return path


FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
OUTPUT_FILE = OutputPath(dir_okay=False, path_type=Path)
OUTPUT_FOLDER = OutputPath(file_okay=False, path_type=Path)
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


connection = grouped("Connection")
security = grouped("Security")


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


def endpoint_option(text: str, *, several: bool = False) -> Callable[..., Any]:
    """`--endpoint`. `several`: it may be repeated; the command gets all as `endpoints`."""

    def default(ctx: click.Context, option: click.Parameter, given: Any) -> Any:
        return given or ((last_endpoint(),) if several else last_endpoint())

    shown = {"envvar": "DIPTYCH_ENDPOINT", "metavar": "ADDRESS", "help": f"{text} {DEFAULT}"}
    return connection("--endpoint", *["endpoints"] * several, multiple=several, callback=default, **shown)


ENDPOINT = endpoint_option("Gateway to talk to: HOST:PORT, or grpcs://HOST:PORT for TLS.")
PEM_FILE = click.Path(exists=True, dir_okay=False)
ACCESS = (
    connection("--ca", type=PEM_FILE, envvar="DIPTYCH_CA", help="CA certificates (PEM) to verify the gateway with."),
    connection("--cert", type=PEM_FILE, envvar="DIPTYCH_CERT", help="Client certificate (PEM)."),
    connection("--cert-key", type=PEM_FILE, envvar="DIPTYCH_CERT_KEY", help="Private key of --cert."),
    connection(
        "--key-file",
        type=PEM_FILE,
        envvar="DIPTYCH_KEY_FILE",
        help="File whose first line is the API key. [default: the key in $DIPTYCH_API_KEY]",
    ),
)

FILES = (
    ("--tls-cert-file", "Certificate (PEM) for gRPC and HTTP: turns TLS on, see docs/security.md."),
    ("--tls-key-file", "Private key of --tls-cert-file."),
    ("--tls-client-ca-file", "CA certificates: clients must present a certificate that one of them signed."),
    ("--api-keys-file", "API keys, one per line: requests must carry one of them."),
)


def gateway_file_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the TLS and API key options of a gateway. The command gets `files`: cluster file key to absolute path."""
    names = [option.removeprefix("--").replace("-", "_") for option, _ in FILES]

    @wraps(command)
    def with_files(*args: Any, **options: Any) -> None:
        given = {name: options.pop(name) for name in names}
        # Keep symbolic links: pointing one at another file renews the certificate.
        files = {name: os.path.abspath(path) for name, path in given.items() if path is not None}
        command(*args, files=files, **options)

    for option, text in reversed(FILES):
        with_files = security(option, type=click.Path(dir_okay=False), metavar="FILE", help=text)(with_files)
    return with_files


def client_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--endpoint` and the options of `ACCESS`."""
    with_endpoint: Callable[..., None] = ENDPOINT(access_options(command))
    return with_endpoint


def reloading_client_options(command: Callable[..., None]) -> Callable[..., None]:
    """Like `client_options`, for long-running commands: `access` is a function, which reads the current key."""
    with_endpoint: Callable[..., None] = ENDPOINT(access_options(command, reloads=True))
    return with_endpoint


def access_options(command: Callable[..., None], *, reloads: bool = False) -> Callable[..., None]:
    """Adds the options of `ACCESS`; the command gets them as `access`."""

    @wraps(command)
    def with_options(
        *args: Any, ca: str | None, cert: str | None, cert_key: str | None, key_file: str | None, **options: Any
    ) -> None:
        if (cert is None) != (cert_key is None):
            raise click.UsageError("--cert and --cert-key come together; give both")
        access = partial(_access, ca, cert, cert_key, key_file)
        command(*args, access=access if reloads else access(), **options)

    for option in reversed(ACCESS):
        with_options = option(with_options)
    return with_options


def _access(ca: str | None, cert: str | None, cert_key: str | None, key_file: str | None) -> Access:
    if key_file is None:
        return Access(ca, cert, cert_key)
    from cluster.frontend.auth import read_keys

    return Access(ca, cert, cert_key, next(iter(read_keys(key_file))))
