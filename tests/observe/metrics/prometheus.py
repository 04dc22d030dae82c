"""The real prometheus and promtool: those of the PATH, or out of Debian's package, kept in the user's cache folder.

Where they cannot be had, tests are skipped and say why; with DIPTYCH_PROMETHEUS=1 they fail. No package is installed,
and no service started.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.ports import free_port
from workers.model.content import cache_folder

PACKAGE = "prometheus"
PROGRAMS = ("prometheus", "promtool")
REQUIRED = "DIPTYCH_PROMETHEUS"
CALL_TIMEOUT_S, START_S, STOP_S = 60.0, 30.0, 10.0
SCRAPE = "500ms"  # and its limit: on a busy machine one may failfrom tests.ports import free_port


def program(name: str) -> str:
    """Its path, or a skip; a failure where it must be there."""
    found = shutil.which(name)
    if found is not None:
        return found
    folder, reason = _unpacked()
    if folder is not None:
        return str(folder / name)
    missing = f"nothing is tried with the real {name}: it is not on the PATH, and {reason}"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{missing}; {REQUIRED} says that it must be there", pytrace=False)
    pytest.skip(f"{missing} ({REQUIRED}=1 makes this a failure)")


def promtool(*args: object, stdin: str = "") -> str:
    """What it says. Raises AssertionError unless it is content."""
    command = [program("promtool"), *map(str, args)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=CALL_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@cache
def _unpacked() -> tuple[Path | None, str]:
    """The folder with both programs, or why there is none."""
    folder = cache_folder() / "tools" / PACKAGE
    if all((folder / name).exists() for name in PROGRAMS):
        return folder, ""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None, "there is no apt-get to fetch it with"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for command in (["apt-get", "download", "-q", PACKAGE], ["sh", "-c", "dpkg-deb -x *.deb ."]):
                subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=True)
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return None, f"apt-get cannot fetch {PACKAGE}: {last}"
        except subprocess.TimeoutExpired:
            return None, f"apt-get fetches no {PACKAGE} within {CALL_TIMEOUT_S:.0f} s"
        folder.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            part = folder / f"{name}.{os.getpid()}"  # others may unpack at the same time
            shutil.copy(Path(scratch) / "usr" / "bin" / name, part)
            part.replace(folder / name)
    return folder, ""


@dataclass(frozen=True)
class Prometheus:
    """A running one, and what it says over its HTTP API."""

    http: httpx2.AsyncClient

    async def ask(self, path: str, **parameters: str) -> Any:
        answer = (await self.http.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    async def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """An instant vector: labels, sorted, and value."""
        found = (await self.ask("query", query=expression))["result"]
        return {tuple(sorted(each["metric"].items())): float(each["value"][1]) for each in found}

    async def number(self, expression: str) -> float | None:
        """Of a vector with one element; None while there is none."""
        values = list((await self.query(expression)).values())
        assert len(values) <= 1, f"{expression}: {values}"
        return values[0] if values else None


@asynccontextmanager
async def prometheus(
    targets: list[str], rules: Path, folder: Path, **jobs: dict[str, Any]
) -> AsyncIterator[Prometheus]:
    """Scrapes these on the loopback, with data in `folder`, and is ended by its process id.

    `jobs`: how each scrapes the targets, by its name; without any, there is a plain one.
    """
    path = program("prometheus")
    config = folder / "prometheus.yaml"
    document = {
        "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": targets}]} | scrape
            for name, scrape in (jobs or {"diptych": {}}).items()
        ],
    }
    config.write_text(yaml.safe_dump(document))
    address = f"127.0.0.1:{free_port()}"
    options = f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"
    flags = "--log.level=warn", "--scrape.discovery-reload-interval=100ms"  # the default: 5 s
    command = "sh", "-c", 'exec "$0" "$@" 2>log', path, *options, *flags
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, cwd=folder)
    try:
        async with httpx2.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=10.0) as http:
            await _ready(http, process, folder / "log")
            yield Prometheus(http)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _ready(http: httpx2.AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, _last_words(log)
            with suppress(httpx2.HTTPError):
                if (await http.get("/-/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


def _last_words(log: Path) -> str:
    return log.read_text()
