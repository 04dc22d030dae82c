"""A peer's simulator in a process of its own, which answers jobs in JSON. Knows no peer's interface.

The user names a checkout or environment from the peer's public home; nothing of a peer is kept here.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

DEADLINE_S = 600.0  # for one job
END_S = 10.0
SCRIPTS = Path(__file__).parent


class PeerFailed(RuntimeError):
    """The peer's process ended or was too slow; the message has its last words."""


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Where a peer is: the folder that `variable` names, which has `marker` in it. `script` is one of this package's.

    The peer runs in the Python of `bin` or `.venv/bin` in the folder if there is one, else in this Python.
    """

    title: str
    variable: str
    option: str
    marker: str
    script: str
    home: str

    @property
    def folder(self) -> Path:
        return Path(os.environ.get(self.variable, "not-named")).expanduser()

    def missing(self) -> str:
        """Why the peer cannot run; empty when it can."""
        if next(self.folder.glob(self.marker), None) is not None:
            return ""
        named = f"no {self.marker} in {self.folder}" if self.variable in os.environ else "not named"
        return f"{self.title}: {named}; {self.option} PATH ({self.variable}) names {self.home}"

    @property
    def python(self) -> str:
        found = (path for name in ("bin", ".venv/bin") if (path := self.folder / name / "python").exists())
        return str(next(found, sys.executable))


class PeerSimulator:
    """Made by `started`. One job at a time."""

    def __init__(self, source: PeerSource, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._source, self._process, self._log = source, process, log

    def __call__(self, job: dict[str, Any]) -> Any:
        """Its answer. Raises `PeerFailed`."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "pipes"
        try:
            process.stdin.write(json.dumps(job | {"folder": str(self._source.folder)}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self._words("ended")) from None
        if not select([process.stdout], [], [], DEADLINE_S)[0]:
            raise PeerFailed(self._words(f"gave no answer in {DEADLINE_S:g} s"))
        if not (line := process.stdout.readline()):
            raise PeerFailed(self._words("ended"))
        return json.loads(line)

    def _words(self, what: str) -> str:
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"{self._source.title} {what}: {''.join(last) or 'it wrote nothing'}"


@contextmanager
def started(source: PeerSource) -> Iterator[PeerSimulator]:
    """Ends the process afterwards."""
    with tempfile.TemporaryDirectory(prefix="peer-simulator-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as words:
            process = subprocess.Popen(
                [source.python, str(SCRIPTS / source.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                cwd=folder,
            )
        try:
            yield PeerSimulator(source, process, log)
        finally:
            process.kill()
            process.communicate(timeout=END_S)
