"""Other commands of the same user find the Ray that `serve` started, and ignore stale session files."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.runtime.sessions import Session, announce, folder, sessions, settle_join, withdraw

NAMES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_NUM_REDIS_GET_RETRIES")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and an environment that says nothing of Ray."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the subject sets goes away after the test
        monkeypatch.delenv(name)


@pytest.fixture
def address() -> Iterator[str]:
    """Where somebody listens, as a Ray would."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def said() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_settle_join_sets_address_and_token_of_the_served_ray(address: str) -> None:
    announce(Session("llm", address, "s3cret", os.getpid()))
    assert settle_join() == "llm"
    assert said() == {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"}


def test_a_given_address_gets_its_token(address: str) -> None:
    announce(Session("llm", address, "s3cret", os.getpid()))
    os.environ["RAY_ADDRESS"] = address
    assert settle_join("llm") == "llm" and said()["RAY_AUTH_TOKEN"] == "s3cret"


def test_token_variables_of_the_environment_are_not_changed(address: str) -> None:
    announce(Session("llm", address, "s3cret", os.getpid()))
    os.environ["RAY_AUTH_TOKEN"] = "mine"
    assert settle_join("llm") is None and said() == {"RAY_AUTH_TOKEN": "mine"}


def test_a_session_file_is_private_and_removed_with_its_ray(address: str) -> None:
    path = announce(Session("llm", address, "s3cret", os.getpid()))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    withdraw(str(path))
    assert list(sessions()) == [] and list(folder().iterdir()) == []


@pytest.mark.parametrize("gone", ["process", "port"])
def test_the_session_file_of_a_killed_process_is_removed(address: str, gone: str) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = f"127.0.0.1:{listening.getsockname()[1]}"
    session = ("llm", address, "", ended.pid) if gone == "process" else ("llm", closed, "", os.getpid())
    path = announce(Session(*session))
    assert settle_join() is None and not path.exists()


def test_a_file_that_is_not_a_session_is_ignored(address: str) -> None:
    announce(Session("llm", address, "", os.getpid()))
    (folder() / "1.json").write_text("{")
    assert [each.cluster for each in sessions()] == ["llm"]


def test_several_sessions_need_a_name(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as second:
        other = f"127.0.0.1:{second.getsockname()[1]}"
        announce(Session("llm", address, "a", os.getpid()))
        announce(Session("chat", other, "b", os.getppid()))
        assert settle_join("chat") == "chat" and said()["RAY_ADDRESS"] == other
        for name in NAMES:
            os.environ.pop(name, None)
        with pytest.raises(RuntimeUnavailable, match=r"several clusters are served .*; set RAY_ADDRESS"):
            settle_join()


def test_an_unknown_cluster_name_is_reported_with_the_known_ones(address: str) -> None:
    announce(Session("llm", address, "a", os.getpid()))
    with pytest.raises(RuntimeUnavailable, match=rf"no cluster called 'lm' is served .*; there is llm at {address}"):
        settle_join("lm")
