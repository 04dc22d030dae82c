"""`diptych serve` as a process that gets signals: once, twice, and before it serves."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray
import yaml

from cluster.cli.lifetime import RAY_PROCESSES, RAY_SERVER
from cluster.runtime.ray_start import _started, open_ray
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.spec_file import laptop_spec
from diptych.client import AsyncClient, Completed, DiptychError, TextDelta
from tests.model.tiny import write_tiny_llama

TOKENS = 60
START_S, STOP_S = 60.0, 20.0
SLOW = {"step_s": 0.03, "prefill_token_s": 0.0, "prefill_pair_s": 0.0, "decode_row_s": 0.0, "decode_context_s": 0.0}


class Server:
    """`lines` is all it printed, standard error among it."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process = process
        self._path = path

    @property
    def lines(self) -> list[str]:
        return self._path.read_text().splitlines()

    def press_ctrl_c(self) -> None:
        with suppress(ProcessLookupError):  # the process may have ended, and asyncio learns of it later
            os.killpg(self.process.pid, signal.SIGINT)

    async def printed(self, start: str) -> None:
        """Return when a line with this start is there."""
        async with asyncio.timeout(STOP_S):
            while not any(line.startswith(start) for line in self.lines):
                await asyncio.sleep(0.01)

    async def endpoint(self) -> str:
        async with asyncio.timeout(START_S):
            while True:
                assert self.process.returncode is None, self.lines
                for line in self.lines:
                    if line.startswith("ready: grpc://"):
                        return line.split("//")[1]
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """It ended by itself, orderly, and "closed" is its last output."""
        assert await asyncio.wait_for(self.process.wait(), STOP_S) == 0, self.lines
        assert self.lines[-1] == "closed" and not any("Traceback" in line for line in self.lines), self.lines


@asynccontextmanager
async def server(folder: Path, *options: str) -> AsyncIterator[Server]:
    """One worker of simulated steps of 30 ms, in a process group of its own, as in a shell."""
    pool = {"name": "all", "role": "mixed", "cost": SLOW, "engine": {"kv_blocks": 512, "max_batch_tokens": 64}}
    document = {"name": "ending", "model": str(write_tiny_llama(folder / "tiny")), "executor": "simulated"}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document | {"pools": [pool]}))
    command = [sys.executable, "-u", "-m", "cluster.cli", "serve", "-f", str(folder / "cluster.yaml"), "--port", "0"]
    with (folder / "output").open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--runtime", "local", *options, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Server(process, folder / "output")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def test_the_first_ctrl_c_refuses_new_requests_and_lets_running_ones_finish(tmp_path: Path) -> None:
    async with server(tmp_path) as subject, AsyncClient(await subject.endpoint()) as client:
        tokens, ended = 0, False
        async for event in client.generate("the sea", max_tokens=TOKENS, ignore_eos=True):
            if isinstance(event, TextDelta):
                if not tokens:
                    subject.press_ctrl_c()
                tokens += len(event.tokens)
            ended = isinstance(event, Completed)
        assert (tokens, ended) == (TOKENS, True)
        with pytest.raises(DiptychError) as refused:
            await client.complete("the sea", max_tokens=1)
        assert refused.value.code == "UNAVAILABLE"
        await subject.end()
    assert "closing: running requests may end within 10 s; Ctrl-C cuts them" in subject.lines


async def test_the_second_ctrl_c_cancels_running_requests_with_a_reason(tmp_path: Path) -> None:
    async with server(tmp_path, "--grace", "60") as subject, AsyncClient(await subject.endpoint()) as client:
        with pytest.raises(DiptychError, match="the gateway was closed; try again") as cut:
            async for event in client.generate("the sea", max_tokens=2000, ignore_eos=True):
                if isinstance(event, TextDelta) and event.first_position == 0:
                    subject.press_ctrl_c()
                    await subject.printed("closing: ")
                    subject.press_ctrl_c()
        assert (cut.value.code, cut.value.reason) == ("UNAVAILABLE", "GATEWAY_CLOSED")
        while subject.process.returncode is None:
            subject.press_ctrl_c()
            await asyncio.sleep(0.05)
        await subject.end()


async def test_a_stream_gets_the_reason_when_the_grace_period_ends(tmp_path: Path) -> None:
    async with server(tmp_path, "--grace", "0.5") as subject, AsyncClient(await subject.endpoint()) as client:
        with pytest.raises(DiptychError, match="the gateway was closed; try again"):
            async for event in client.generate("the sea", max_tokens=2000, ignore_eos=True):
                if isinstance(event, TextDelta) and event.first_position == 0:
                    subject.press_ctrl_c()
        await subject.end()


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelling_while_ray_starts_shuts_ray_down_first(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    events: list[str] = []
    begun, cancelled = threading.Event(), threading.Event()

    def init(**options: object) -> None:
        begun.set()
        cancelled.wait(STOP_S)
        events.append("started")
        if fails:
            raise Exception("the current node timed out during startup")

    def progress(line: str) -> None:
        events.append(line)
        cancelled.set()

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: events.append("ended"))
    starting = asyncio.ensure_future(_started({}, progress))
    await asyncio.to_thread(begun.wait)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    del starting
    gc.collect()
    assert not reported
    assert events == ["closing: Ray is still starting and ends after that", "started", "ended"]


async def test_a_ray_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RuntimeUnavailable, match="a local Ray cannot be reached: The current node timed out"):
        await open_ray(laptop_spec(), lambda line: None)


STUCK = """
import asyncio, subprocess, sys, time
from cluster.cli.lifetime import run
async def work():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print(child.pid, flush=True)
    try:
        await asyncio.to_thread(time.sleep, 60)  # as Ray's start
    finally:
        print("cancelled", flush=True)
        await asyncio.to_thread(time.sleep, 60)
run(work())
"""


def test_the_second_ctrl_c_during_startup_kills_all_processes() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cancelled\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_S) == 130
    assert process.stderr.read() == "closed\n"
    child.wait(STOP_S)


BLOCKED = """
import asyncio, subprocess, sys, time
from cluster.cli.lifetime import run
async def work():
    server = subprocess.Popen([sys.argv[1], "-c", sys.argv[2]], stdout=subprocess.PIPE)
    server.stdout.read(1)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(child.pid, flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        time.sleep(60)  # as calls to a Ray that is gone
run(work())
"""


LINGERS = """
import signal, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
signal.signal(signal.SIGTERM, lambda *_: listener.close())
print("1", flush=True)
time.sleep(60)
"""


def test_a_signal_to_rays_processes_too_ends_all_in_seconds(tmp_path: Path) -> None:
    """As systemd and some containers send it."""
    server = tmp_path / RAY_SERVER
    server.symlink_to(os.path.realpath(sys.executable))
    command = [sys.executable, "-c", BLOCKED, str(server), LINGERS]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    child = psutil.Process(int(process.stdout.readline()))
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(STOP_S) == 0
    assert process.stderr.read() == "closed\n"
    child.wait(STOP_S)


SERVES = """
import subprocess, sys, time
from cluster.cli import lifetime
lifetime.RAY_GONE_S = 0.1
server = subprocess.Popen([sys.argv[1], "-c", sys.argv[2]], stdout=subprocess.PIPE)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
with lifetime._ends_with_ray():
    server.stdout.read(1)
    print(server.pid, child.pid, flush=True)
    time.sleep(60)  # as a call to a Ray that is gone
"""


@pytest.mark.parametrize("name", RAY_PROCESSES)
def test_the_death_of_a_process_that_ray_needs_ends_all_and_is_named(tmp_path: Path, name: str) -> None:
    (needed := tmp_path / name).symlink_to(os.path.realpath(sys.executable))
    command = [sys.executable, "-c", SERVES, str(needed), LINGERS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    server, child = map(psutil.Process, map(int, process.stdout.readline().split()))
    server.kill()
    assert process.wait(STOP_S) == 1
    said = process.stderr.read()
    assert f"{name} (pid {server.pid}) has ended" in said and said.endswith("closed\n")
    child.wait(STOP_S)
