"""Session files: one for each Ray that `diptych serve` started here, so that the user's other commands can join it.

A file has the token of its Ray, so only its owner can read it. A file is stale if its process or port is gone; readers
delete stale files. Does not import Ray, which reads its environment on import.
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

from cluster.runtime.runtime_errors import RuntimeUnavailable

AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
CONNECT_S = 1.0
AUTO_TRIES = "3"

Record = TypeVar("Record", bound=msgspec.Struct)


class Session(msgspec.Struct, frozen=True):
    """`address`: HOST:PORT of Ray's GCS. `token` empty: no authentication."""

    cluster: str
    address: str
    token: str
    pid: int


def folder() -> Path:
    import platformdirs

    with warnings.catch_warnings():  # it warns if it cannot use XDG_RUNTIME_DIR
        warnings.simplefilter("ignore")
        return platformdirs.user_runtime_path("diptych")


def announce(session: Session) -> Path:
    """Write the file; the process that stops this Ray removes it. Raises OSError."""
    return write_record(folder(), session, session.pid)


def write_record(where: Path, record: msgspec.Struct, pid: int) -> Path:
    """Write a file for this process, readable only by its owner. Raises OSError."""
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
    """The readable records, ignoring files of other users."""
    for path in sorted(where.glob("*.json")):
        with suppress(OSError, msgspec.MsgspecError):
            if path.stat().st_uid == os.getuid():
                yield msgspec.json.decode(path.read_bytes(), type=kind), path


def withdraw(path: str) -> None:
    """Delete the file. Empty: there is none."""
    if path:
        Path(path).unlink(missing_ok=True)


def sessions() -> Iterator[Session]:
    """The live sessions. Deletes stale files."""
    for session, path in read_records(folder(), Session):
        if is_served(session.address, session.pid):
            yield session
        else:
            path.unlink(missing_ok=True)


def settle_join(cluster: str | None = None) -> str | None:
    """Before Ray is imported: set address and token of the Ray that serves this cluster (None: any).

    Variables that are already set win. Returns the cluster's name; None: it is not served here. Raises
    `RuntimeUnavailable` if the choice is ambiguous.
    """
    address = os.environ.get("RAY_ADDRESS")
    if any(name in os.environ for name in AUTH_VARIABLES):
        return None
    there = [each for each in sessions() if address in (None, each.address)]
    found = [each for each in there if cluster in (None, each.cluster)]
    if len(found) == 1:
        os.environ["RAY_ADDRESS"] = found[0].address
        os.environ["RAY_AUTH_MODE"] = "token" if found[0].token else "disabled"
        os.environ["RAY_AUTH_TOKEN"] = found[0].token
        return found[0].cluster
    if not address and not there:  # Ray would retry once a second on a Ray that needs a token
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", AUTO_TRIES)
    elif there and not address:
        named = ", ".join(f"{each.cluster} at {each.address}" for each in found or there)
        if found:
            raise RuntimeUnavailable(f"several clusters are served on this machine: {named}; set RAY_ADDRESS to one")
        raise RuntimeUnavailable(f"no cluster called {cluster!r} is served on this machine; there is {named}")
    return None


def is_served(address: str, pid: int) -> bool:
    """Whether the process is alive and HOST:PORT accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        with suppress(PermissionError):
            os.kill(pid, 0)
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def settle_auth() -> None:
    """Before Ray is imported: generate a token for a Ray that we start, unless RAY_ADDRESS or RAY_AUTH_MODE is set.

    Otherwise Ray would write a token into the user's home, which every later Ray there would expect.
    """
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
