"""On Ray: a worker flips and another joins while requests stream; no token or role is lost, and no process is left."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cluster.spec import Role
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.view import ClusterView, WorkerState
from tests.ray.served import Served, laptop, listens, served, services

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.timeout(300)]

PROMPT = [5, 6, 7] * 20


def document() -> dict[str, object]:
    """Simulated workers, and room for a third decode worker. Roles and replicas change by hand only."""
    made = laptop(executor="simulated", elastic={"mode": "off"})
    for pool in made["pools"]:
        pool["resources"] = {"cpu": 0.1}
    made["pools"][1]["replicas"] = {"min": 2, "max": 3}
    made["pools"][0]["replicas"] = 1
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(document(), Path(tmp_path_factory.mktemp("elastic"))) as subject:
        yield subject


async def until(client: AsyncClient, is_so: Callable[[ClusterView], bool], timeout_s: float = 60.0) -> ClusterView:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                if is_so(view := (await client.status(timeout_s=2.0)).view):
                    return view
            except DiptychError:
                pass
            await asyncio.sleep(0.1)


def ready(view: ClusterView) -> dict[str, Role]:
    return {each.name: each.role for each in view.workers if each.state is WorkerState.READY}


async def flipped(client: AsyncClient, worker: str, role: Role) -> int:
    """The revision after the flip, which is repeated while the cluster changes meanwhile."""

    async def flip() -> int:
        return await client.flip(worker, role, revision=(await client.status()).view.revision)

    return await changed(flip)


async def changed(change: Callable[[], Awaitable[int]]) -> int:
    """The revision after a change, which is repeated while the cluster changes, or its controller restarts."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                return await change()
            except DiptychError as error:
                assert "ABORTED" in str(error) or "UNAVAILABLE" in str(error)
                await asyncio.sleep(0.1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_flip_and_a_scale_out_under_streams(subject: Served) -> None:
    async with AsyncClient(subject.endpoint) as client:
        flowing = asyncio.Event()

        async def stream(name: str) -> tuple[list[int], int]:
            """A simulated worker derives tokens from the request's name and seed."""
            tokens: list[int] = []
            async for event in client.generate(PROMPT, request_id=name, seed=7, max_tokens=150):
                tokens.extend(getattr(event, "tokens", ()))
                if tokens:
                    flowing.set()
            return tokens, event.attempts  # type: ignore[union-attr]

        names = [f"stream-{index}" for index in range(6)]
        streams = [asyncio.ensure_future(stream(name)) for name in names]
        await flowing.wait()
        revision = await flipped(client, "decode-1", Role.PREFILL)
        with pytest.raises(DiptychError, match="ABORTED"):
            await client.scale("decode", 3, revision=revision - 1)
        await client.scale("decode", 3)
        roles = {
            "prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.PREFILL, "decode-2": Role.DECODE,
        }  # fmt: skip
        view = await until(client, lambda view: ready(view) == roles)
        tested = {(link.owner, link.reader) for link in view.links}
        assert tested >= {("decode-1", "decode-2"), ("decode-1", "decode-0")} and not view.unlinked
        answers = await asyncio.gather(*streams)
        assert answers == await asyncio.gather(*(stream(name) for name in names))
        assert all(len(tokens) == 150 and attempts == 1 for tokens, attempts in answers)
        with pytest.raises(DiptychError, match="FAILED_PRECONDITION"):
            await client.scale("decode", 4)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_restarted_controller_knows_roles_and_new_workers_and_drains_a_worker(subject: Served) -> None:
    port = int(subject.endpoint.rpartition(":")[2])
    async with AsyncClient(subject.endpoint) as client:
        before = await until(client, lambda view: len(ready(view)) == 4)
        (controller,) = [each for each in services(subject) if not listens(each, port)]
        os.kill(controller.pid, signal.SIGKILL)
        after = await until(client, lambda view: view.revision > before.revision and len(ready(view)) == 4)
        assert ready(after) == ready(before)
        assert {each.name: each.incarnation for each in after.workers} == {
            each.name: each.incarnation for each in before.workers
        }
        left = next(each for each in after.workers if each.name == "decode-2")
        assert psutil.pid_exists(left.pid)
        await client.drain("decode-2")
        view = await until(client, lambda view: "decode-2" not in {each.name for each in view.workers})
        assert {pool.name: pool.wanted for pool in view.pools} == {"prefill": 1, "decode": 2}
        await client.scale("decode", 3)
        again = await until(client, lambda view: len(ready(view)) == 4)
        new = next(each for each in again.workers if each.name == "decode-2")
        assert new.incarnation != left.incarnation, "the name was reused for a new worker"
        assert not psutil.pid_exists(left.pid)
        assert len((await client.complete(PROMPT, max_tokens=8, temperature=0.0)).output.tokens) == 8


async def killed(subject: Served) -> None:
    """Kill the controller, as soon as it is there."""
    port = int(subject.endpoint.rpartition(":")[2])
    async with asyncio.timeout(60.0):
        while not (found := [each for each in services(subject) if not listens(each, port)]):
            await asyncio.sleep(0.1)
    os.kill(found[0].pid, signal.SIGKILL)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_controller_killed_in_the_middle_of_changes_finishes_them(subject: Served) -> None:
    """Killed right after it has acknowledged a start of a worker, a flip, and a drain under streams."""
    async with AsyncClient(subject.endpoint) as client:
        before = await until(client, lambda view: {"decode-0", "decode-1"} <= set(ready(view)))
        if "decode-2" in ready(before):
            await client.drain("decode-2")
            await until(client, lambda view: "decode-2" not in {each.name for each in view.workers})
        names = [f"changing-{index}" for index in range(6)]

        async def stream(name: str) -> list[int]:
            done = await client.complete(PROMPT, request_id=name, seed=7, max_tokens=400)
            return list(done.output.tokens)

        streams = [asyncio.ensure_future(stream(name)) for name in names]
        await client.scale("decode", 3)
        await killed(subject)
        await until(client, lambda view: "decode-2" in ready(view))
        await flipped(client, "decode-2", Role.PREFILL)
        await killed(subject)
        await changed(lambda: client.drain("decode-2"))
        await killed(subject)
        view = await until(client, lambda view: "decode-2" not in {each.name for each in view.workers})
        assert {pool.name: pool.wanted for pool in view.pools} == {"prefill": 1, "decode": 2}
        answers = await asyncio.gather(*streams)
        assert answers == await asyncio.gather(*(stream(name) for name in names))
        audit = (await client.status(audit=True)).view
        assert {each.audit for each in audit.workers} == {"clean"}
