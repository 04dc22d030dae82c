"""Where a gateway is and how to authenticate: options of the commands that talk to one, and of those that open one.

A key is never an argument: it would show in the shell's history and in the process list.
"""

import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import click

from cluster.cli.groups import grouped
from cluster.cli.local_servers import last_endpoint
from diptych.access import Access

DEFAULT = "[default: $DIPTYCH_ENDPOINT, else the last server started on this machine, else 127.0.0.1:50051]"

connection = grouped("Connection")
security = grouped("Security")


def default_endpoint(ctx: click.Context, option: click.Parameter, value: str | None) -> str:
    return value or last_endpoint()


ENDPOINT = connection(
    "--endpoint",
    envvar="DIPTYCH_ENDPOINT",
    metavar="ADDRESS",
    callback=default_endpoint,
    help=f"Gateway to talk to: HOST:PORT, or grpcs://HOST:PORT for TLS. {DEFAULT}",
)
FILE = click.Path(exists=True, dir_okay=False)
ACCESS = (
    connection("--ca", type=FILE, envvar="DIPTYCH_CA", help="CA certificates (PEM) to verify the gateway with."),
    connection("--cert", type=FILE, envvar="DIPTYCH_CERT", help="Client certificate (PEM)."),
    connection("--cert-key", type=FILE, envvar="DIPTYCH_CERT_KEY", help="Private key of --cert."),
    connection(
        "--key-file",
        type=FILE,
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


def filed(command: Callable[..., None]) -> Callable[..., None]:
    """Options for what guards a gateway. The command gets those given as `files`, by their names in a cluster file."""
    names = [option.removeprefix("--").replace("-", "_") for option, _ in FILES]

    @wraps(command)
    def with_files(*args: Any, **options: Any) -> None:
        given = {name: options.pop(name) for name in names}
        # Links are not followed: one that is turned to another file is a renewal.
        files = {name: os.path.abspath(path) for name, path in given.items() if path is not None}
        command(*args, files=files, **options)

    for option, words in reversed(FILES):
        with_files = security(option, type=click.Path(dir_okay=False), metavar="FILE", help=words)(with_files)
    return with_files


def accessed(command: Callable[..., None]) -> Callable[..., None]:
    """The options of `ACCESS`; the command gets them as `access`."""

    @wraps(command)
    def with_access(*args: Any, access: Callable[[], Access], **options: Any) -> None:
        command(*args, access=access(), **options)

    return _accessed(with_access)


def addressed(command: Callable[..., None]) -> Callable[..., None]:
    """The same and `endpoint`."""
    with_endpoint: Callable[..., None] = ENDPOINT(accessed(command))
    return with_endpoint


def addressed_for_long(command: Callable[..., None]) -> Callable[..., None]:
    """For commands that stay while keys are renewed: `access` is a function that reads the key again."""
    with_endpoint: Callable[..., None] = ENDPOINT(_accessed(command))
    return with_endpoint


def _accessed(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def with_options(
        *args: Any, ca: str | None, cert: str | None, cert_key: str | None, key_file: str | None, **options: Any
    ) -> None:
        if (cert is None) != (cert_key is None):
            raise click.UsageError("--cert and --cert-key come together; give both")
        command(*args, access=partial(_access, ca, cert, cert_key, key_file), **options)

    for option in reversed(ACCESS):
        with_options = option(with_options)
    return with_options


def _access(ca: str | None, cert: str | None, cert_key: str | None, key_file: str | None) -> Access:
    return Access(ca, cert, cert_key, None if key_file is None else _first_key(key_file))


def _first_key(path: str) -> str:
    from cluster.frontend.auth import read_keys

    return next(iter(read_keys(path)))
