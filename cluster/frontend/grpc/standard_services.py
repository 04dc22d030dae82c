"""gRPC's standard services: health (grpc.health.v1), based on the cluster's view, and reflection.

The server as a whole and the inference service are SERVING while a worker is ready, the admin service while the server
is open.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from cluster.frontend.context import ClusterQueries
from cluster.frontend.gateway import servable
from cluster.frontend.grpc.address_limit import AddressLimit

Context = grpc.aio.ServicerContext[Any, Any]
Response = health_pb2.HealthCheckResponse
MAX_WATCHES = 1024  # they have no deadline, and need no key
MAX_WATCHES_PER_ADDRESS = 256
V1 = "grpc.reflection.v1.ServerReflection"
V1_FILE = "grpc/reflection/v1/reflection.proto"


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Owned by the server. `need_workers`: services that are SERVING only while a worker is ready."""

    def __init__(self, queries: ClusterQueries, need_workers: tuple[str, ...], others: tuple[str, ...]) -> None:
        self._queries = queries
        self._need_workers = need_workers
        self._others = others
        self._closing = asyncio.Event()
        self._num_watches = 0
        self._by_address = AddressLimit(MAX_WATCHES_PER_ADDRESS)

    def close(self) -> None:
        """Report NOT_SERVING from now on, and end all watches."""
        self._closing.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        status = self._status(request.service)
        if status == Response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if self._num_watches >= MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} watches run; call Check instead")
        self._num_watches += 1
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            async with self._by_address.held(context):
                await self._watch(request.service, context, closing)
        finally:
            closing.cancel()
            self._num_watches -= 1

    async def _watch(self, service: str, context: Context, closing: "asyncio.Future[Any]") -> None:
        sent: int | None = None
        while True:
            change = asyncio.ensure_future(self._queries.view_change())  # before reading, so that none is missed
            try:
                is_last = self._closing.is_set()  # before the write: the server may close during it
                status = self._status(service)
                if status != sent:
                    await context.write(Response(status=status))
                    sent = status
                if is_last:
                    return
                await asyncio.wait((change, closing), return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()

    def _status(self, service: str) -> int:
        if service not in self._need_workers + self._others:
            return int(Response.SERVICE_UNKNOWN)
        serving = service in self._others or servable(self._queries.view)
        if serving and not self._closing.is_set():
            return int(Response.SERVING)
        return int(Response.NOT_SERVING)


def add_reflection(names: Iterable[str], server: grpc.aio.Server) -> None:
    """Serve the descriptors of these services, and of reflection itself, under the names v1 and v1alpha.

    Both have the same wire format; new clients use v1, and the library has only v1alpha.
    """
    _register_v1()
    names = (*names, V1, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method}),))


def _register_v1() -> None:
    """Add v1's descriptor to the default pool, unless another library has done so."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(V1_FILE)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        alpha.ClearField("options")  # language packages, and the mark as deprecated
        text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
