"""Runs `diptych serve` as a process on a Ray of its own, for tests, and checks that nothing is left afterwards."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.frontend.text import TextDelta, TextEvent
from diptych.client import AsyncClient
from diptych.view import ClusterView, WorkerState, WorkerView

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
STOP_S = 40.0


@dataclass
class Served:
    """A running `diptych serve`. `lines` is what it printed, `exit_status` what it must end with."""

    endpoint: str
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    exit_status: int = 0


def laptop(**changes: Any) -> dict[str, Any]:
    """examples/laptop.yaml on any free port, with a router that always splits prefill and decode."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "laptop.yaml").read_text())
    document["gateway"] |= {"grpc_port": 0, "routing": "least-loaded"}
    document["name"] = f"test-{os.getpid()}"
    return document | changes


def with_pools(document: dict[str, Any], **replicas: int) -> dict[str, Any]:
    pools = [pool | {"replicas": replicas.get(pool["name"], pool["replicas"])} for pool in document["pools"]]
    return document | {"pools": pools}


@asynccontextmanager
async def served(document: dict[str, Any], folder: Path, **environment: str) -> AsyncIterator[Served]:
    """Serve until the block ends; then press Ctrl-C and check the exit status, and that no process is left."""
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cluster.cli", "serve", "-f", str(path),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env | {"PYTHONUNBUFFERED": "1"} | environment,
        cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    subject = Served("", process)
    reading = asyncio.ensure_future(_read(subject))
    family: set[psutil.Process] = set()
    try:
        async with asyncio.timeout(START_S):
            while not subject.endpoint:
                if process.returncode is not None:
                    raise AssertionError("serve ended: " + "\n".join(subject.lines))
                await asyncio.sleep(0.1)
        family = {psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)}
        yield subject
        if process.returncode is None:
            family |= set(psutil.Process(process.pid).children(recursive=True))
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
        await reading
        _, left = await asyncio.to_thread(psutil.wait_procs, list(family), 15.0)
        for each in left:
            each.kill()
    said = f"serve ended with {process.returncode}: " + "\n".join(subject.lines)
    assert process.returncode == subject.exit_status, said
    assert not left, f"left running: {left}"


async def _read(subject: Served) -> None:
    assert subject.process.stdout is not None
    async for raw in subject.process.stdout:
        line = raw.decode(errors="replace").rstrip()
        subject.lines.append(line)
        if line.startswith("ready: grpc://"):
            subject.endpoint = line.removeprefix("ready: grpc://")


def services(subject: Served) -> list[psutil.Process]:
    """The processes of controller and gateway."""
    children = psutil.Process(subject.process.pid).children(recursive=True)
    return [each for each in children if "_ServiceActor" in _command(each)]


def _command(process: psutil.Process) -> str:
    """Empty for a process that has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def listens(process: psutil.Process, port: int) -> bool:
    return any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections())


def streamed_tokens(events: list[TextEvent]) -> list[int]:
    """The tokens. Every position must arrive once and in order."""
    tokens: list[int] = []
    for event in events:
        if isinstance(event, TextDelta):
            assert event.first_position == len(tokens), "a position was repeated or left out"
            tokens += event.tokens
    return tokens


def worker(view: ClusterView, name: str) -> WorkerView:
    return next(each for each in view.workers if each.name == name)


async def until(client: AsyncClient, timeout_s: float, holds: Callable[[ClusterView], bool]) -> ClusterView:
    async with asyncio.timeout(timeout_s):
        while not holds(view := (await client.status()).view):
            await asyncio.sleep(0.02)
    return view


def at_rest(view: ClusterView) -> bool:
    return all(
        each.state is WorkerState.READY and each.stats.free_blocks == each.stats.total_blocks and not each.stats.leases
        for each in view.workers
    ) and view.linked("prefill-0", "decode-0")
