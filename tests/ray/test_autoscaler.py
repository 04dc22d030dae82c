"""With Ray's autoscaler: a growing pool adds a node, a shrinking one removes it, and no token is lost."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.events import Accepted
from diptych.client import AsyncClient, ClusterStatus
from diptych.view import WorkerState, WorkerView
from tests.ray.autoscaled import STORE_BYTES, Autoscaled, autoscaled
from tests.ray.served import Served, laptop, served
from workers.executor.simulated import simulated_token

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7] * 7
PREFILLS = {"step_s": 0.005, "decode_row_s": 1.0, "prefill_token_s": 0.0001}  # so that a role change does not help
DECODES = {"step_s": 0.2, "decode_row_s": 0.02, "prefill_token_s": 0.0001}
TPOT_S = 0.45  # 12 decodes on one worker, and far from it with 2
IDLE_S = 3.0
WAIT_S = 90.0


@dataclass
class Subject:
    ray: Autoscaled
    served: Served
    client: AsyncClient

    async def until(self, is_so: Callable[[ClusterStatus], bool]) -> ClusterStatus:
        end_s = asyncio.get_running_loop().time() + WAIT_S
        while not is_so(status := await self.client.status()):
            assert asyncio.get_running_loop().time() < end_s, f"{status.view.workers} after {status.decisions}"
            await asyncio.sleep(0.1)
        return status

    async def nodes_until(self, is_so: Callable[[str], bool]) -> str:
        """The output of `ray status`, once `is_so` holds."""
        end_s = asyncio.get_running_loop().time() + WAIT_S
        while not is_so(output := await self.ray.status()):
            assert asyncio.get_running_loop().time() < end_s, output
            await asyncio.sleep(0.2)
        return output


def document() -> dict[str, object]:
    """The head has room for one worker of each pool; a second decode worker needs a node of its own."""
    made = laptop(executor="simulated")
    prefill, decode = made["pools"]
    prefill |= {"resources": {"cpu": 0.5, "custom": {"prefill": 1}}, "cost": PREFILLS}
    decode |= {"resources": {"cpu": 1, "custom": {"decode": 1}}, "cost": DECODES, "replicas": {"min": 1, "max": 2}}
    made["gateway"] |= {"slo": {"tpot_s": TPOT_S}}
    made["health"] = {"place_timeout_s": 90.0, "dead_after_s": 10.0}
    made["elastic"] = {"mode": "act", "period_s": 0.2, "window_s": 4.0, "dwell_s": 0.5, "cooldown_s": 0.5}
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    folder = Path(tmp_path_factory.mktemp("autoscaler"))
    decodes = {"resources": {"CPU": 1, "decode": 1, "object_store_memory": STORE_BYTES}, "max_workers": 1}
    async with (
        autoscaled({"CPU": 2, "prefill": 1, "decode": 1}, {"decodes": decodes}, IDLE_S) as ray,
        served(document(), folder, **ray.environment) as serving,
        AsyncClient(serving.endpoint) as client,
    ):
        yield Subject(ray, serving, client)


def worker(status: ClusterStatus, name: str) -> WorkerView | None:
    return next((each for each in status.view.workers if each.name == name), None)


def is_ready(name: str) -> Callable[[ClusterStatus], bool]:
    return lambda status: (found := worker(status, name)) is not None and found.state is WorkerState.READY


def has_gone(name: str) -> Callable[[ClusterStatus], bool]:
    return lambda status: worker(status, name) is None


def nodes(output: str) -> int:
    """The number of nodes for decode workers."""
    return sum(int(count) for count in re.findall(r"^ (\d+) decodes$", output, re.MULTILINE))


async def answer(client: AsyncClient, name: str, max_tokens: int, seen: Callable[[], None] = lambda: None) -> set[int]:
    """Check every token of a request, which a simulated worker derives from its name. Returns its attempts."""
    tokens: list[int] = []
    attempts: set[int] = set()
    async for event in client.generate(PROMPT, request_id=name, max_tokens=max_tokens):
        if isinstance(event, Accepted):
            attempts.add(event.attempt)
        tokens.extend(getattr(event, "tokens", ()))
        if tokens:
            seen()
    assert tokens == [simulated_token(f"{name}/0", len(PROMPT) + n, 1000, (0,)) for n in range(max_tokens)]
    return attempts


async def test_scale_up_adds_a_node_that_serves_until_scale_down(subject: Subject) -> None:
    client = subject.client
    await client.scale("decode", 2)
    status = await subject.until(lambda status: bool((found := worker(status, "decode-1")) and found.waits_for))
    waiting = worker(status, "decode-1")
    assert waiting is not None and waiting.trouble == "waits for a node: {CPU: 1, decode: 1}"
    status = await subject.until(is_ready("decode-1"))
    assert all(not each.trouble for each in status.view.workers)
    assert status.view.linked("prefill-0", "decode-1")

    flowing = asyncio.Event()
    streams = [asyncio.ensure_future(answer(client, f"stream-{n}", 60, flowing.set)) for n in range(4)]
    await flowing.wait()
    await subject.until(lambda status: bool((found := worker(status, "decode-1")) and found.stats.running))
    assert nodes(await subject.nodes_until(lambda output: nodes(output) > 0)) == 1
    await client.drain("decode-1")
    await subject.until(has_gone("decode-1"))
    assert await asyncio.gather(*streams) == [{0}] * 4, "what decoded there went on elsewhere"
    output = await subject.nodes_until(lambda output: nodes(output) == 0)
    assert "1.0/1.0 decode" in output and "(no resource demands)" in output, "no demand is left of the removed worker"


async def test_a_scale_up_without_a_matching_node_type_can_be_reverted(subject: Subject) -> None:
    await subject.client.scale("prefill", 2)
    asked = await subject.nodes_until(lambda output: "(no resource demands)" not in output)
    assert re.search(r"'prefill': 1\.0.*1\+ pending placement groups", asked)
    await subject.client.scale("prefill", 1)
    status = await subject.until(has_gone("prefill-1"))
    assert worker(status, "prefill-0") is not None
    await subject.nodes_until(lambda output: "(no resource demands)" in output)


@pytest.mark.skipif("DIPTYCH_AUTOSCALER" not in os.environ, reason="a minute; make autoscaler")
async def test_load_adds_a_node_and_idleness_removes_it(subject: Subject) -> None:
    client = subject.client
    names = (f"request-{n}" for n in range(100_000))

    async def ask(max_tokens: int, over: asyncio.Event) -> None:
        while not over.is_set():
            await answer(client, next(names), max_tokens)

    async def under(count: int, max_tokens: int, awaited: Awaitable[ClusterStatus]) -> ClusterStatus:
        """Keep `count` requests running until the cluster is as expected."""
        over = asyncio.Event()
        asking = [asyncio.ensure_future(ask(max_tokens, over)) for _ in range(count)]
        try:
            return await awaited
        finally:
            over.set()
            await asyncio.gather(*asking)

    def outcomes(status: ClusterStatus, kind: str) -> list[str]:
        return [taken.outcome for taken in status.decisions if taken.decision.kind == kind]

    def took_some(status: ClusterStatus) -> bool:
        return "done" in outcomes(status, "grow") and worker(status, "decode-1").stats.running > 0  # type: ignore[union-attr]

    status = await under(60, 12, subject.until(took_some))
    assert nodes(await subject.nodes_until(lambda output: nodes(output) > 0)) == 1
    status = await under(2, 4, subject.until(lambda status: "done" in outcomes(status, "shrink")))
    assert outcomes(status, "grow") == ["done"] == outcomes(status, "shrink")
    await subject.nodes_until(lambda output: nodes(output) == 0)
