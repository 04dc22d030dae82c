"""The Rays that `serve` started on this machine: a file for each, by which other commands of the same user join them.

A file holds its Ray's token, so it and its folder are for their owner alone. One whose process or port is gone was left
behind by a killed process, and is removed when it is seen. Loads no Ray: Ray reads its environment when it is imported.
"""

import os
import secrets
import socket
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.runtime.errors import RuntimeUnavailable

SAID = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
CONNECT_S = 1.0
AUTO_TRIES = "3"

Record = TypeVar("Record", bound=msgspec.Struct)


class Session(msgspec.Struct, frozen=True):
    """`address`: HOST:PORT of Ray's control store. `token` empty: it asks for none."""

    cluster: str
    address: str
    token: str
    pid: int


def folder() -> Path:
    import platformdirs

    with warnings.catch_warnings():  # it takes another folder where XDG_RUNTIME_DIR cannot be used, and says so
        warnings.simplefilter("ignore")
        return platformdirs.user_runtime_path("diptych")


def announce(session: Session) -> Path:
    """Write the file; the process that stops this Ray removes it. Raises OSError."""
    return write_record(folder(), session, session.pid)


def write_record(where: Path, record: msgspec.Struct, pid: int) -> Path:
    """A file for this process, readable by its owner alone. Raises OSError."""
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    if where.stat().st_uid != os.getuid():
        raise PermissionError(f"{where} belongs to another user")
    path = where / f"{pid}.json"
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(record))
    return fresh.rename(path)


def read_records(where: Path, kind: type[Record]) -> Iterator[tuple[Record, Path]]:
    """Those that can be read; files of other users are not looked at."""
    for path in sorted(where.glob("*.json")):
        with suppress(OSError, msgspec.MsgspecError):
            if path.stat().st_uid == os.getuid():
                yield msgspec.json.decode(path.read_bytes(), type=kind), path


def withdraw(path: str) -> None:
    """Empty: there is no file."""
    if path:
        Path(path).unlink(missing_ok=True)


def sessions() -> Iterator[Session]:
    """Those that are there."""
    for session, path in read_records(folder(), Session):
        if is_served(session.address, session.pid):
            yield session
        else:
            path.unlink(missing_ok=True)


def settle_join(cluster: str | None = None) -> str | None:
    """Before Ray is imported: say to it where the cluster of this name (None: any) is served, and by which token.

    What the environment says comes first. Answers the cluster's name; None: `serve` runs elsewhere. Raises
    `RuntimeUnavailable` where it is not clear which one is meant.
    """
    address = os.environ.get("RAY_ADDRESS")
    if any(name in os.environ for name in SAID):
        return None
    there = [each for each in sessions() if address in (None, each.address)]
    found = [each for each in there if cluster in (None, each.cluster)]
    if len(found) == 1:
        os.environ["RAY_ADDRESS"] = found[0].address
        os.environ["RAY_AUTH_MODE"] = "token" if found[0].token else "disabled"
        os.environ["RAY_AUTH_TOKEN"] = found[0].token
        return found[0].cluster
    if not address and not there:  # Ray may find one here, and asks it once a second for nothing if it has a token
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", AUTO_TRIES)
    elif there and not address:
        named = ", ".join(f"{each.cluster} at {each.address}" for each in found or there)
        if found:
            raise RuntimeUnavailable(f"several clusters are served on this machine: {named}; set RAY_ADDRESS to one")
        raise RuntimeUnavailable(f"no cluster called {cluster!r} is served on this machine; there is {named}")
    return None


def is_served(address: str, pid: int) -> bool:
    """Whether the process lives and somebody accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with suppress(PermissionError):
            os.kill(pid, 0)
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def settle_auth() -> None:
    """Before Ray is imported: give a Ray of our own a token of its own. A mode that is set, or a cluster, is respected.

    Left alone, a local Ray writes a token into the user's home and changes what every later Ray there expects.
    """
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
