"""Gateways and controllers restart after a crash, and an unreachable Ray is one line of error."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import psutil
import pytest
import pytest_asyncio

from cluster.cli.lifetime import RAY_GONE_S, RAY_SERVER
from cluster.spec import HealthSpec
from diptych.client import Answer, AsyncClient, answer_of
from diptych.errors import DiptychError
from diptych.retry import Retry
from diptych.view import ClusterView, WorkerState
from tests.model.tiny import write_tiny_llama
from tests.ports import free_port
from tests.ray.served import ROOT, Served, at_rest, laptop, listens, served, services, until, worker

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.timeout(400)]

DEAD_AFTER_S = HealthSpec().dead_after_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A tiny model: the tests are about restarts, and that streams continue with the same tokens."""
    folder = Path(tmp_path_factory.mktemp("services"))
    document = laptop(model=str(write_tiny_llama(folder / "tiny")))
    document["gateway"]["http_port"] = free_port()
    async with served(document, folder) as subject:
        yield subject


def starts(view: ClusterView) -> dict[str, tuple[str, int]]:
    return {each.name: (each.incarnation, each.restarts) for each in view.workers}


async def answer(endpoint: str) -> int:
    async with AsyncClient(endpoint) as client:
        done = await client.complete([5, 6, 7] * 20, max_tokens=4, temperature=0.0, timeout_s=5.0)
        return len(done.completed.transfers)


async def answer_with_retry(endpoint: str, timeout_s: float) -> int:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await answer(endpoint)
            except DiptychError:
                await asyncio.sleep(0.2)


async def command(*arguments: str) -> asyncio.subprocess.Process:
    """Run `diptych` as from another shell of the same user, without RAY_* variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "cluster.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
        cwd=ROOT,
    )


def test_a_ray_of_our_own_has_no_process_that_does_nothing_here(subject: Served) -> None:
    commands = [" ".join(each.cmdline()) for each in psutil.Process(subject.process.pid).children(recursive=True)]
    assert any("gcs_server" in command for command in commands)
    assert not [command for command in commands if "log_monitor.py" in command or "/autoscaler/" in command]


async def streamed(endpoint: str, began: asyncio.Event) -> Answer:
    """A long answer; the client continues a broken stream."""
    events = []
    async with AsyncClient(endpoint, retry=Retry()) as client:
        async for event in client.generate([5, 6, 7] * 20, max_tokens=400, seed=3, ignore_eos=True):
            events.append(event)
            if len(events) == 5:
                began.set()
    return answer_of(events)


@pytest.mark.asyncio(loop_scope="module")
async def test_gateway_and_leave_find_the_ray_of_serve(subject: Served) -> None:
    name = laptop()["name"]
    joining = await command("gateway", "--cluster", name, "--port", "0", "--http-port", "0")
    assert joining.stdout is not None
    try:
        async with asyncio.timeout(90.0):
            while not (line := (await joining.stdout.readline()).decode()).startswith("ready: grpc://"):
                assert line and "InvalidAuthToken" not in line, line
        assert await answer(line.split("//")[1].strip()) == 1
    finally:
        joining.send_signal(signal.SIGINT)
        output, _ = await joining.communicate()
    assert (joining.returncode, output.decode().splitlines()[-1]) == (0, "closed")
    leaving = await command("leave", "--deadline", "5")
    output, _ = await leaving.communicate()
    assert leaving.returncode == 1 and f"has the controller of {name}" in output.decode()
    assert "end `diptych serve` there" in output.decode() and "InvalidAuthToken" not in output.decode()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_gateway_restarts_on_its_ports(subject: Served) -> None:
    assert await answer(subject.endpoint) == 1
    port = int(subject.endpoint.rpartition(":")[2])
    (gateway,) = [each for each in services(subject) if listens(each, port)]
    ports = {each.laddr.port for each in gateway.net_connections() if each.status == psutil.CONN_LISTEN}
    streaming = asyncio.ensure_future(streamed(subject.endpoint, began := asyncio.Event()))
    await began.wait()
    os.kill(gateway.pid, signal.SIGKILL)
    assert await answer_with_retry(subject.endpoint, 60.0) == 1
    async with asyncio.timeout(60.0):
        resumed, undisturbed = await streaming, await streamed(subject.endpoint, asyncio.Event())
    assert resumed.output.tokens == undisturbed.output.tokens and len(resumed.output.tokens) == 400
    assert "." in resumed.accepted.request_id and "." not in undisturbed.accepted.request_id
    (url,) = [line.removeprefix("ready: ") for line in subject.lines if line.startswith("ready: http://")]
    assert int(url.removesuffix("/v1").rpartition(":")[2]) in ports
    async with httpx2.AsyncClient(trust_env=False, timeout=10.0) as http:
        completion = await http.post(f"{url}/completions", json={"prompt": [5, 6, 7] * 20, "max_tokens": 4})
    assert completion.json()["usage"]["completion_tokens"] == 4


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_controller_restarts_and_keeps_its_workers(subject: Served) -> None:
    assert await answer_with_retry(subject.endpoint, 30.0) == 1
    port = int(subject.endpoint.rpartition(":")[2])
    (controller,) = [each for each in services(subject) if not listens(each, port)]
    async with AsyncClient(subject.endpoint) as client:
        before = (await client.status()).view
        os.kill(controller.pid, signal.SIGKILL)
        assert await answer(subject.endpoint) == 1  # without a controller
        await until(client, 60.0, lambda view: view.revision > before.revision and at_rest(view))
        after = (await client.status(audit=True)).view
    assert {each.name: each.incarnation for each in after.workers} == {
        each.name: each.incarnation for each in before.workers
    }
    assert await answer(subject.endpoint) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_paused_controller_and_gateway_do_not_declare_workers_dead(subject: Served) -> None:
    """They pause longer than `dead_after_s`, but shorter than workers wait for a gateway."""
    assert await answer_with_retry(subject.endpoint, 30.0) == 1
    async with AsyncClient(subject.endpoint) as client:
        before = starts((await client.status()).view)
        streaming = asyncio.ensure_future(streamed(subject.endpoint, began := asyncio.Event()))
        await began.wait()
        stopped = services(subject)
        for each in stopped:
            os.kill(each.pid, signal.SIGSTOP)
        await asyncio.sleep(2 * DEAD_AFTER_S)
        for each in stopped:
            os.kill(each.pid, signal.SIGCONT)
        answered = await asyncio.wait_for(streaming, 60.0)
        assert len(answered.output.tokens) == 400 and answered.completed.attempts == 1
        assert "." not in answered.accepted.request_id
        with contextlib.suppress(TimeoutError):  # long enough for a false alarm
            await until(client, DEAD_AFTER_S * 1.5, lambda view: starts(view) != before)
        assert starts((await client.status()).view) == before
    assert {each.pid for each in services(subject)} == {each.pid for each in stopped}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stopped_worker_is_replaced(subject: Served) -> None:
    async with AsyncClient(subject.endpoint) as client:
        stopped = worker((await client.status()).view, "decode-0")
        os.kill(stopped.pid, signal.SIGSTOP)
        done = await client.complete([5, 6, 7] * 20, max_tokens=4, temperature=0.0, timeout_s=20.0)
        assert len(done.output.tokens) == 4
        await until(
            client,
            60.0,
            lambda view: (
                worker(view, "decode-0").incarnation != stopped.incarnation
                and worker(view, "decode-0").state is WorkerState.READY
                and view.linked("prefill-0", "decode-0")
            ),
        )
    assert not psutil.pid_exists(stopped.pid)
    assert await answer_with_retry(subject.endpoint, 30.0) == 1


def test_an_unreachable_ray_is_reported_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "serve", "-f", str(ROOT / "examples" / "laptop.yaml")],
        env=os.environ | {"RAY_ADDRESS": "127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("Error: Ray at 127.0.0.1:9 cannot be reached")
    assert "Traceback" not in done.stderr


@pytest.mark.asyncio
async def test_serve_ends_in_seconds_when_ray_dies(tmp_path: Path) -> None:
    async with served(laptop(executor="simulated"), tmp_path) as subject:
        subject.exit_status = 1
        children = psutil.Process(subject.process.pid).children(recursive=True)
        (server,) = [each for each in children if each.name() == RAY_SERVER]
        server.kill()
        async with asyncio.timeout(4 * RAY_GONE_S):
            await subject.process.wait()
    assert any(f"{RAY_SERVER} (pid {server.pid}) has ended" in line for line in subject.lines)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("with_gateway", [False, True])
async def test_streams_survive_the_death_of_all_workers_at_once(subject: Served, with_gateway: bool) -> None:
    assert await answer_with_retry(subject.endpoint, 60.0) == 1
    port = int(subject.endpoint.rpartition(":")[2])
    async with AsyncClient(subject.endpoint) as client:
        before = await until(client, 60.0, at_rest)
        streaming = asyncio.ensure_future(streamed(subject.endpoint, began := asyncio.Event()))
        await began.wait()
        gateways = [each.pid for each in services(subject) if listens(each, port)]
        for pid in [each.pid for each in before.workers] + gateways * with_gateway:
            os.kill(pid, signal.SIGKILL)
        resumed = await asyncio.wait_for(streaming, 90.0)
        after = await until(client, 60.0, at_rest)
        assert not {each.incarnation for each in after.workers} & {each.incarnation for each in before.workers}
        assert {each.audit for each in (await client.status(audit=True)).view.workers} == {"clean"}
    undisturbed = await streamed(subject.endpoint, asyncio.Event())
    assert resumed.output.tokens == undisturbed.output.tokens and len(resumed.output.tokens) == 400
