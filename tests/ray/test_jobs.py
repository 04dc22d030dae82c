"""`ray job submit` starts the service on a running cluster; stopping the job stops everything."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, run
from urllib.request import Request, urlopen

import psutil
import pytest
import yaml

from diptych.client import AsyncClient
from tests.ports import free_port
from tests.ray.served import ROOT, laptop

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

RAY = [str(Path(sys.executable).with_name("ray"))]
AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    return clean | AUTH | {"PATH": path, "RAY_DISABLE_IMPORT_WARNING": "1"}


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A Ray head with a dashboard on free loopback ports; yields its process and the address for jobs."""
    ports = {
        name: free_port()
        for name in ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    }
    # A short path, because socket paths are limited.
    folder = Path("/tmp") / f"dip-{os.getpid()}"
    command = [
        *RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1",
        f"--temp-dir={folder}", "--num-cpus=4", "--object-store-memory=100000000",
        *(f"--{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    process = Popen(command, env=environment(), stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True)
    family: list[psutil.Process] = []
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        deadline = time.monotonic() + 90
        while not answers(f"{address}/api/version"):
            assert process.poll() is None, f"ray start ended: {process.stdout.read() if process.stdout else ''}"
            assert time.monotonic() < deadline, "the Ray head did not come up"
            time.sleep(0.2)
        yield psutil.Process(process.pid), address
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([*family, psutil.Process(process.pid)], 20.0)
        for each in alive:
            each.kill()


def answers(url: str) -> bool:
    call = Request(url, headers={"Authorization": f"Bearer {AUTH['RAY_AUTH_TOKEN']}"})
    try:
        with urlopen(call, timeout=5.0) as reply:
            return reply.status == 200
    except OSError:
        return False


def submit(address: str, file: str, submission: str) -> None:
    """As `examples/ray-job.sh` does."""
    command = [str(ROOT / "examples" / "ray-job.sh"), file, submission]
    done = run(command, cwd=ROOT, env=environment() | {"RAY_ADDRESS": address}, capture_output=True, text=True)
    assert done.returncode == 0, f"the job was not taken: {done.stdout}{done.stderr}"


def job(address: str, *arguments: str) -> str:
    done = run([*RAY, "job", *arguments], env=environment() | {"RAY_ADDRESS": address}, capture_output=True, text=True)
    assert done.returncode == 0, f"ray job {arguments[0]} failed: {done.stdout}{done.stderr}"
    return done.stdout


def diptych_processes(head: psutil.Process) -> list[str]:
    """Our actors and the driver under this Ray, by their titles."""
    titles = []
    for each in head.children(recursive=True):
        try:
            title = " ".join(each.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "_WorkerActor" in title or "_ServiceActor" in title or "diptych serve" in title:
            titles.append(title)
    return titles


async def test_a_submitted_job_serves_until_it_is_stopped(head: tuple[psutil.Process, str], tmp_path: Path) -> None:
    process, address = head
    document = laptop(name="jobs")
    port = document["gateway"]["grpc_port"] = free_port()
    # Ray uploads the working directory, so the file must be inside; it is removed at once.
    path = ROOT / "examples" / f".jobs-{os.getpid()}.yaml"
    path.write_text(yaml.safe_dump(document))
    try:
        submit(address, f"examples/{path.name}", "serve")
    finally:
        path.unlink()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        try:
            await client.wait_ready(120.0)
        except BaseException:
            print(job(address, "logs", "serve"))
            raise
        answer = await client.complete("The capital of France is", max_tokens=8, temperature=0.0)
        assert list(answer.output.tokens) == [7042, 30, 198, 198, 504, 2988, 314, 42]
        assert len(answer.completed.transfers) == 1
    assert len(diptych_processes(process)) >= 5  # driver, controller, gateway, two workers

    assert "was stopped" in job(address, "stop", "serve")
    async with asyncio.timeout(60):
        while diptych_processes(process):
            await asyncio.sleep(0.5)
