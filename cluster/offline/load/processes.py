"""Starts and stops child processes of a measurement. Every wait has a timeout."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil


class ProcessFailed(Exception):
    """A child exited, or did not print the expected line in time."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a child's output, and when it was read (`time.perf_counter`)."""

    text: str
    at_s: float


class Child:
    """A program and its descendants. A thread reads its output; the creator calls `end` or uses `with`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.started_s = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(os.environ) | dict(env or {}),
            start_new_session=True,
        )
        self._command = command
        self._queue: queue.Queue[Line | None] = queue.Queue()
        self._seen: list[Line] = []
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._queue.put(Line(text.rstrip(), time.perf_counter()))
        self._queue.put(None)

    def write_line(self, text: str) -> None:
        """Write to its stdin. Raises `ProcessFailed` if the pipe is closed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ProcessFailed(f"{self._name} no longer reads its input ({error}){self._last}") from error

    def wait_line(self, part: str, timeout_s: float) -> Line:
        """The next line that contains `part`. Raises `ProcessFailed` when the child exits or time runs out."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise ProcessFailed(f"{self._name} did not print {part!r} in {timeout_s:g} s{self._last}") from None
            if line is None:
                raise ProcessFailed(f"{self._name} ended before it printed {part!r}{self._last}")
            self._seen.append(line)
            if part in line.text:
                return line

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines that `wait_line` has read."""
        return tuple(self._seen)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def _name(self) -> str:
        return " ".join(self._command[:4])

    @property
    def _last(self) -> str:
        text = " | ".join(line.text for line in self._seen[-6:])
        return f"; its last lines: {text}" if text else ""

    def family(self) -> list[psutil.Process]:
        """The process and its descendants that are alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        return []

    def end(self, timeout_s: float = 30.0) -> None:
        """Close its stdin and send SIGTERM; after `timeout_s`, SIGKILL the rest of the family. May be called twice."""
        family = self.family()
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        _, alive = psutil.wait_procs(family, timeout=3.0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5.0)
        self._process.wait(5.0)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
