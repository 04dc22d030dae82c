"""Health, reflection, opening and closing."""

import asyncio
import pickle
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.events import Completed
from cluster.frontend.grpc.server import GrpcServer
from cluster.frontend.grpc.standard_services import V1, HealthService
from cluster.frontend.servers import open_servers
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.retry import Retry
from diptych.view import WorkerState
from diptych.wire import ADMIN, INFERENCE
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context, view
from tests.frontend.tokenizers import ByteTokenizer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(endpoint: str, service: str) -> int:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def test_health_follows_the_workers(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    assert [await health_of(client.endpoint, name) for name in ("", INFERENCE, ADMIN)] == [SERVING] * 3
    dispatcher.view = view(WorkerState.DEAD, revision=2)
    assert [await health_of(client.endpoint, name) for name in ("", INFERENCE)] == [NOT_SERVING] * 2
    assert await health_of(client.endpoint, ADMIN) == SERVING


async def test_an_unknown_service_is_not_found(client: AsyncClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(client.endpoint, "no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_health_watch_gets_each_change_and_the_end(dispatcher: FakeDispatcher) -> None:
    server = GrpcServer(gateway_context(dispatcher), ByteTokenizer)
    endpoint = await server.open()
    async with grpc.aio.insecure_channel(endpoint) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        received = aiter(watch)
        assert (await anext(received)).status == SERVING
        dispatcher.view = view(WorkerState.STARTING, revision=2)
        assert (await anext(received)).status == NOT_SERVING
        dispatcher.view = view(WorkerState.READY, revision=3)
        assert (await anext(received)).status == SERVING
        async with asyncio.timeout(15.0):  # a watcher does not use up the grace
            closing = asyncio.ensure_future(server.close(30.0))
            assert (await anext(received)).status == NOT_SERVING
            await closing


async def test_a_health_watch_notices_a_close_during_a_write(dispatcher: FakeDispatcher) -> None:
    service = HealthService(dispatcher, (INFERENCE,), (ADMIN,))
    statuses: list[int] = []

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def write(self, response: health_pb2.HealthCheckResponse) -> None:
            statuses.append(response.status)
            service.close()

    async with asyncio.timeout(30.0):
        await service.Watch(health_pb2.HealthCheckRequest(service=INFERENCE), cast(Any, Context()))
    assert statuses == [SERVING, NOT_SERVING]


async def test_wait_ready_waits_for_the_workers(client: AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.view = view(WorkerState.STARTING, revision=2)
    with pytest.raises(DiptychError, match=r"was not ready after 0\.1 s"):
        await client.wait_ready(0.1)
    waiting = asyncio.ensure_future(client.wait_ready(5.0))
    dispatcher.view = view(WorkerState.READY, revision=3)
    await waiting


async def test_reflection_lists_the_services(client: AsyncClient) -> None:
    async with grpc.aio.insecure_channel(client.endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))
    names = {service.name for service in answer.list_services_response.service}
    assert {INFERENCE, ADMIN, "grpc.health.v1.Health"} <= names


async def test_reflection_v1_has_its_own_messages(client: AsyncClient) -> None:
    """As clients ask who know nothing of v1alpha; what they are told describes v1 itself."""
    pool = descriptor_pool.DescriptorPool()
    asked = [{"fileContainingSymbol": V1}, {"listServices": ""}, {"fileContainingSymbol": INFERENCE}]
    async with grpc.aio.insecure_channel(client.endpoint) as channel:
        call: Any = channel.stream_stream(f"/{V1}/ServerReflectionInfo")
        raw = [ParseDict(each, reflection_pb2.ServerReflectionRequest()).SerializeToString() for each in asked]
        answers = [answer async for answer in call(iter(raw))]
    described = reflection_pb2.ServerReflectionResponse.FromString(answers[0]).file_descriptor_response
    (file,) = described.file_descriptor_proto
    pool.AddSerializedFile(file)
    (method,) = pool.FindServiceByName(V1).methods
    response = GetMessageClass(method.output_type)
    assert response.DESCRIPTOR.full_name == "grpc.reflection.v1.ServerReflectionResponse"
    listed, inference = (cast(Any, response).FromString(answer) for answer in answers[1:])
    assert {INFERENCE, ADMIN, V1} <= {service.name for service in listed.list_services_response.service}
    assert inference.file_descriptor_response.file_descriptor_proto


async def test_close_lets_running_requests_finish(dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.02
    server = GrpcServer(gateway_context(dispatcher), ByteTokenizer)
    async with AsyncClient(await server.open()) as client:
        events = client.generate("hello", max_tokens=20)
        await anext(events)
        closing = asyncio.ensure_future(server.close(10.0))
        last = [event async for event in events][-1]
        assert isinstance(last, Completed) and last.completion_tokens == 20
        await closing
        with pytest.raises(DiptychError) as caught:
            await client.complete("hello")
        assert caught.value.code == "UNAVAILABLE"


async def test_a_client_of_several_gateways_survives_the_close_of_one(dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.01
    servers = [GrpcServer(gateway_context(dispatcher), ByteTokenizer) for _ in range(2)]
    addresses = ",".join([await server.open() for server in servers])
    async with AsyncClient(f"ipv4:{addresses}", retry=Retry()) as client:
        last = client.generate("hello", max_tokens=20)
        await anext(last)
        closing = asyncio.ensure_future(servers[0].close(10.0))
        received = await asyncio.gather(*(client.complete("hello", max_tokens=5) for _ in range(8)))
        assert [each.completed.completion_tokens for each in received] == [5] * 8
        ended = [event async for event in last][-1]
        assert isinstance(ended, Completed) and ended.completion_tokens == 20
        await closing
    await servers[1].close(0.0)


async def test_close_cancels_requests_after_the_grace_period(dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = asyncio.Event()
    server = GrpcServer(gateway_context(dispatcher), ByteTokenizer)
    async with AsyncClient(await server.open()) as client:
        events = client.generate("hello")
        await anext(events)
        async with asyncio.timeout(20.0):
            await server.close(0.2)
        assert not dispatcher.running


def test_the_server_factory_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(open_servers)) is open_servers
