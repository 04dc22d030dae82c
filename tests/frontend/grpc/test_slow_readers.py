"""A client that stays connected and reads nothing: its call ends, and neither gateway nor workers keep any of it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cluster.frontend.context import GatewayContext
from cluster.frontend.grpc import sender
from cluster.frontend.grpc.server import GrpcServer
from diptych.v1 import inference_pb2, inference_pb2_grpc
from tests.cluster.local import Cluster, cluster, split_spec
from tests.offline.profile.served import AnyTokenizer

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
TOKENS = 4000


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Cluster, GrpcServer, inference_pb2_grpc.InferenceServiceStub]]:
    """Workers, a server, and a client that has little room for what it does not read."""
    spec = split_spec(kv_blocks=2200)
    spec = replace(spec, gateway=replace(spec.gateway, grpc_port=0))
    async with cluster(spec) as subject:
        model = subject.dispatcher.view.model
        assert model is not None
        server = GrpcServer(GatewayContext("gateway-0", spec, model, subject.dispatcher), AnyTokenizer)
        try:
            async with grpc.aio.insecure_channel(await server.open(), options=SMALL_WINDOW) as channel:
                yield subject, server, inference_pb2_grpc.InferenceServiceStub(channel)
        finally:
            await server.close(0.0)


def long_request(request_id: str, num_answers: int = 1, max_tokens: int = TOKENS) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(request_id=request_id, text="hello")
    request.sampling.max_tokens, request.sampling.n = max_tokens, num_answers
    return request


@pytest.mark.parametrize("method", ["Generate", "GenerateBatch"])
async def test_the_request_of_a_client_that_reads_nothing_is_ended(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "SEND_S", 1.0)
    async with served() as (subject, server, stub):
        if method == "Generate":
            call = stub.Generate(long_request("idle", num_answers=8))
        else:
            requests = [long_request(f"idle-{index}") for index in range(8)]
            call = stub.GenerateBatch(inference_pb2.GenerateBatchRequest(requests=requests))
        await call.read()
        counted = ("grpc", method, "DEADLINE_EXCEEDED")
        async with asyncio.timeout(30):
            while server.models.active < 8:
                await asyncio.sleep(0.01)
            while server.models.active or dict(server.models.responses.rows()).get(counted) != 1:
                await asyncio.sleep(0.01)
        assert subject.workers["decode-0"].engine.stats().steps < TOKENS  # it was cut and did not come to its end
        await subject.settle()
        with pytest.raises(grpc.aio.AioRpcError) as failure:  # a client that reads again hears why
            while await call.read() is not grpc.aio.EOF:
                pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        status = rpc_status.from_call(failure.value)
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info) and info.reason == "OUTPUT_NOT_TAKEN"
        assert "read no output for 1 s" in status.message
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_client_that_reads_slowly_keeps_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "SEND_S", 2.0)
    async with served() as (_, _, stub):
        call = stub.Generate(long_request("slow", max_tokens=300))
        await call.read()
        num_tokens = num_read = 0
        while (message := await call.read()) is not grpc.aio.EOF:
            num_tokens += len(message.delta.token_ids)
            num_read += 1
            if num_read <= 3:
                await asyncio.sleep(0.2)
        assert num_tokens == 300 and await call.code() is grpc.StatusCode.OK
