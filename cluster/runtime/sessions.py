"""The Rays that `serve` started on this machine: a file for each, by which other commands of the same user join them.

A file holds its Ray's token, so it and its folder are for their owner alone. One whose process or port is gone was left
behind by a killed process, and is removed when it is seen. Loads no Ray: Ray reads its environment when it is imported.
"""

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from cluster.runtime.errors import RuntimeUnavailable

SAID = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
CONNECT_S = 1.0
AUTO_TRIES = "3"


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
    """Write it down; whoever ends this Ray removes the file. Raises OSError."""
    where = folder()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    if where.stat().st_uid != os.getuid():
        raise PermissionError(f"{where} belongs to another user")
    path = where / f"{session.pid}.json"
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(session))
    return fresh.rename(path)


def withdraw(path: str) -> None:
    """Empty: there is no file."""
    if path:
        Path(path).unlink(missing_ok=True)


def sessions() -> Iterator[Session]:
    """Those that are there. Files of other users are not looked at."""
    for path in sorted(folder().glob("*.json")):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            session = msgspec.json.decode(path.read_bytes(), type=Session)
        except (OSError, msgspec.MsgspecError):
            continue
        if _lives(session):
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


def _lives(session: Session) -> bool:
    host, _, port = session.address.rpartition(":")
    try:
        with suppress(PermissionError):
            os.kill(session.pid, 0)
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
