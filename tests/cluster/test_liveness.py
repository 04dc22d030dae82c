"""Equal request ids of two gateways do not collide, refused requests are not canceled, and silence is detected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from benchmarks.outputs_reader import OutputsReader
from cluster.dispatch.message_queue import LIVENESS_S
from cluster.events import Event, Unservable
from cluster.offline.sim import clock
from cluster.offline.sim.cluster import PoolModel, SimCluster, open_cluster
from cluster.spec import HealthSpec
from tests.cluster.local import Cluster, cluster, completed, generate, request, split_spec, tokens_of
from tests.offline.sim.cases import split
from workers.costs import LinearCost
from workers.errors import InvalidRequest, WorkerError
from workers.executor.simulated import simulated_token
from workers.request import FailedOut, FinishReason, Request
from workers.subscribers import SUBSCRIBER_TIMEOUT_S
from workers.worker import Worker

SLOW = LinearCost(0.001, 0.0001, 0.0, 0.02, 0.0, 0.0, 0.0)
MODELS = {pool: PoolModel(SLOW, vocab_size=1000) for pool in ("prefill", "decode")}


def exact(name: str, length: int, count: int) -> list[int]:
    return [simulated_token(f"{name}/0", length + n, 1000, (0,)) for n in range(count)]


@asynccontextmanager
async def opened() -> AsyncIterator[Cluster]:
    spec = split_spec(backends=("simulated",))
    async with cluster(replace(spec, pools=tuple(replace(pool, cost=SLOW) for pool in spec.pools)), SLOW) as subject:
        yield subject


async def of(subject: SimCluster, gateway: int, wanted: Request) -> list[Event]:
    return [event async for event in generate(subject.dispatchers[gateway], wanted)]


def test_clients_of_two_gateways_may_use_the_same_id() -> None:
    async def scene() -> None:
        spec = split(gateways=2)
        async with open_cluster(spec, MODELS) as subject:
            first, second = request("job-1", 50, max_tokens=60), request("job-1", 30, max_tokens=40, first=500)
            early = asyncio.ensure_future(of(subject, 0, first))
            await asyncio.sleep(0.5)
            late = await of(subject, 1, second)
            assert tokens_of(late) == exact("job-1", 30, 40) and completed(late).attempts == 1
            assert tokens_of(await early) == exact("job-1", 50, 60) and completed(await early).attempts == 1

    clock.run(scene())


def test_an_id_may_be_reused_right_after_a_cancellation() -> None:
    async def scene() -> None:
        async with opened() as subject:
            stream = generate(subject.dispatcher, request("job-1", 50, max_tokens=60))
            async for event in stream:
                if tokens_of([event]):
                    break
            await stream.aclose()
            assert completed(await subject.run(request("job-1", 50))).attempts == 1

    clock.run(scene())


def test_a_refused_request_is_not_cancelled_at_the_worker() -> None:
    """Even if, by a mistake, two requests had the same name there, the refusal of one would not end the other."""

    async def scene() -> None:
        spec = split(gateways=2)
        async with open_cluster(spec, MODELS) as subject:
            subject.dispatchers[1]._process = subject.dispatchers[0]._process
            first = asyncio.ensure_future(of(subject, 0, request("a", 50, max_tokens=60)))
            await asyncio.sleep(0.5)
            with pytest.raises(Unservable, match="already running here"):
                await of(subject, 1, request("a", 30))
            assert tokens_of(await first) == exact("a", 50, 60)

    clock.run(scene())


def test_a_cancelled_request_ends_pending_calls() -> None:
    async def scene() -> None:
        async with opened() as subject:
            worker = subject.workers["decode-0"]
            reader = await OutputsReader.open(worker, "me")
            await worker.generate(replace(request("a", 50, max_tokens=100), reply_to="me"))
            await reader.next()
            await worker.cancel("a/0")
            outputs = (await reader.next()).outputs
            await reader.close()
            assert isinstance(outputs[-1], FailedOut) and outputs[-1].key == "a/0"
            await subject.settle()

    clock.run(scene())


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_request_that_its_worker_lost_silently_is_retried(worker: str) -> None:
    async def scene() -> None:
        async with opened() as subject:
            length, after_s = (2000, 0.1) if worker == "prefill-0" else (50, 0.5)
            running = asyncio.ensure_future(subject.run(request("a", length, max_tokens=40)))
            await asyncio.sleep(after_s)
            victim = subject.workers[worker]
            ((key, _),) = victim._subscribers.routes.items()
            del victim._subscribers.routes[key]
            assert victim.engine.sequences.abort(key)
            begun_s = asyncio.get_running_loop().time()
            events = await running
            assert tokens_of(events) == exact("a", length, 40) and completed(events).attempts == 2
            assert asyncio.get_running_loop().time() - begun_s < 3 * LIVENESS_S + 5.0
            await subject.settle()

    clock.run(scene())


def test_a_prompt_that_waits_long_does_not_count_as_lost() -> None:
    async def scene() -> None:
        async with opened() as subject:
            slow = subject.workers["prefill-0"]._executor
            slow.cost = None  # type: ignore[attr-defined]
            execute = slow.execute

            async def later(plan):
                await asyncio.sleep(10 * LIVENESS_S)
                return await execute(plan)

            slow.execute = later
            end = completed(await subject.run(request("a", 50)))
            assert end.attempts == 1 and end.finish is FinishReason.LENGTH

    clock.run(scene())


def test_a_gateway_that_was_silent_too_long_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process: the worker ends what it had, and the gateway, once it goes on, learns that and recovers."""
    has_room, subscribe = asyncio.Event(), Worker.subscribe

    async def with_room(self: Worker, subscriber: str, on_outputs, deferred=None):
        await subscribe(self, subscriber, on_outputs, has_room.wait)

    async def scene() -> None:
        has_room.set()
        monkeypatch.setattr(Worker, "subscribe", with_room)
        spec = split()
        patient = HealthSpec(heartbeat_s=1.0, dead_after_s=10 * SUBSCRIBER_TIMEOUT_S)
        async with open_cluster(replace(spec, health=patient), MODELS) as subject:
            (dispatcher,) = subject.dispatchers
            running = asyncio.ensure_future(of(subject, 0, request("a", 50, max_tokens=1500)))
            await asyncio.sleep(1.0)
            has_room.clear()
            line = dispatcher.discovery.clients["decode-0"]
            await asyncio.sleep(1.5 * SUBSCRIBER_TIMEOUT_S)
            assert not subject.runtime.workers["decode-0"].engine.has_work
            has_room.set()
            assert tokens_of(await running) == exact("a", 50, 1500) and completed(await running).attempts == 2
            assert "took no outputs for 10 s" in (line.lost or "")

    clock.run(scene())


def test_requests_need_a_subscriber_and_end_with_its_subscription() -> None:
    async def scene() -> None:
        async with opened() as subject:
            worker = subject.workers["decode-0"]
            asked = replace(request("a", 50, max_tokens=2000), reply_to="me")
            with pytest.raises(WorkerError, match="me gets the outputs and has not subscribed"):
                await worker.generate(asked)
            reader = await OutputsReader.open(worker, "me")
            with pytest.raises(WorkerError, match="me subscribed before; choose another name"):
                await worker.subscribe("me", print)
            with pytest.raises(InvalidRequest):
                await worker.generate(replace(request("b", 5000), reply_to="me"))
            await worker.generate(asked)
            await reader.close()
            with pytest.raises(WorkerError, match="has not subscribed"):
                await worker.generate(asked)
            await subject.settle()

    clock.run(scene())
