"""On three Ray nodes: one leaves and gateways join and end while requests stream; no request fails."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from ray.cluster_utils import Cluster

from cluster.frontend.text import TextDelta
from diptych.client import Answer, AsyncClient, answer_of
from tests.ray.served import ROOT, laptop

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.timeout(240)]

STORE = 80 << 20
START_S = 90.0
PROMPT, TOKENS = [5, 6, 7] * 20, 200


class Command:
    """A running `diptych ...` that is a driver of this Ray."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self, begins: str) -> str:
        assert self.process.stdout is not None
        output = []
        async with asyncio.timeout(START_S):
            while line := (await self.process.stdout.readline()).decode().strip():
                output.append(line)
                if line.startswith(begins):
                    return line
        raise AssertionError("\n".join(output))

    async def ended(self) -> tuple[int, str]:
        async with asyncio.timeout(START_S):
            out, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode().strip()


async def begun(address: str, *args: str) -> Command:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL if args[0] != "leave" else asyncio.subprocess.STDOUT,
        env=os.environ | {"RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
    )
    return Command(process)


@asynccontextmanager
async def running(address: str, *args: str) -> AsyncIterator[Command]:
    command = await begun(address, *args)
    try:
        yield command
    finally:
        if command.process.returncode is None:
            command.process.send_signal(signal.SIGTERM)
            await command.ended()


def document(name: str) -> dict[str, object]:
    made = laptop(executor="simulated", name=name)
    prefill, decode = made["pools"]
    prefill |= {"replicas": 1, "resources": {"cpu": 0.1, "labels": {"part": "a"}}}
    decode |= {"replicas": 2, "resources": {"cpu": 0.5, "labels": {"part": "b"}}}
    return made


@pytest_asyncio.fixture
async def nodes() -> AsyncIterator[Cluster]:
    there = Cluster()
    there.add_node(num_cpus=1, labels={"part": "a"}, object_store_memory=STORE, include_dashboard=False)
    for _ in range(2):
        there.add_node(num_cpus=1, labels={"part": "b"}, object_store_memory=STORE)
    try:
        yield there
    finally:
        there.shutdown()


async def stream(client: AsyncClient, index: int, first: asyncio.Event) -> Answer:
    """`first` is set at the first token."""
    events = []
    asked: dict[str, Any] = {"request_id": f"r{index}", "max_tokens": TOKENS}  # simulated tokens follow from the id
    async for event in client.generate([index + 1, *PROMPT], **asked):
        events.append(event)
        if isinstance(event, TextDelta):
            first.set()
    return answer_of(events)


async def streams(client: AsyncClient, count: int) -> list["asyncio.Task[Answer]"]:
    """The request streams."""
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.ensure_future(stream(client, index, first)) for index, first in enumerate(begun)]
    await asyncio.gather(*(each.wait() for each in begun))
    return tasks


async def test_a_node_leaves_and_a_gateway_stops_under_load(nodes: Cluster, tmp_path: Path) -> None:
    name = f"test-{os.getpid()}"
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document(name)))
    async with (
        running(nodes.address, "serve", "-f", str(tmp_path / "cluster.yaml"), "--no-gateways") as serving,
        running(nodes.address, "gateway", "--cluster", name, "--port", "0") as gateway,
    ):
        await serving.line("ready: the workers")
        endpoint = (await gateway.line("ready: grpc://")).removeprefix("ready: ")
        async with AsyncClient(endpoint) as client:
            undisturbed = [each.output.tokens for each in await asyncio.gather(*await streams(client, 6))]
            head, first, _ = (each.node_id for each in nodes.list_all_nodes())
            refused = await begun(nodes.address, "leave", head)
            leaving = await begun(nodes.address, "leave", first, "--json")
            disturbed = []
            while leaving.process.returncode is None:
                disturbed += await asyncio.gather(*await streams(client, 6))
            code, output = await refused.ended()
            assert code == 1 and output.endswith(
                f"has the controller of {name}, which would end with it; end `diptych serve` there"
            )
            code, output = await leaving.ended()
            assert code == 0, output
            report = json.loads(output)
            assert [each.partition("/")[2][:7] for each in report["left"]] == ["decode-"] and not report["still_there"]
            assert {each.completed.attempts for each in disturbed} == {1}
            assert [each.output.tokens for each in disturbed] == undisturbed * (len(disturbed) // 6)
            workers = {each.name: each.state for each in (await client.status()).view.workers}
            assert len(workers) == 3 and f"{report['left'][0].partition('/')[2]}" not in workers
            last = await streams(client, 6)
            gateway.process.send_signal(signal.SIGTERM)
            assert [each.output.tokens for each in await asyncio.gather(*last)] == undisturbed
            code, output = await gateway.ended()
            assert (code, output.splitlines()[-1]) == (0, "closed")
