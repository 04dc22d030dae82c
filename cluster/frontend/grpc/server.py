"""The gRPC server: inference, admin, health and reflection services over the gateway of each model.

Knows ports and server options; knows no request.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from cluster.frontend.auth import Authenticator, Tls
from cluster.frontend.connection_limits import connection_limits
from cluster.frontend.context import GatewayContext
from cluster.frontend.gateway import Gateway
from cluster.frontend.grpc.connection_limit import ConnectionLimit
from cluster.frontend.grpc.interceptors import KeyInterceptor, MessageInterceptor, ResponseInterceptor
from cluster.frontend.grpc.services import AdminService, InferenceService, add_inference_service
from cluster.frontend.grpc.standard_services import HealthService, add_reflection
from cluster.frontend.preprocessing import PreprocessingPool
from cluster.frontend.served_models import ServedModels
from cluster.frontend.text import Tokenizer
from diptych.v1 import admin_pb2_grpc
from diptych.wire import ADMIN, INFERENCE, KEEPALIVE, SERVER_SIZES

OPENING_S = 10.0  # for the TLS handshake and the first HTTP/2 frame
IDLE_S = 300.0  # a connection without calls is closed after this; clients reconnect by themselves
MAX_OTHER_CALLS = 2048  # besides requests that run: refusals, calls without a message yet, health, admin
CUT_S = 0.5  # for the final statuses of cancelled requests


class GrpcServer:
    """Owned by its gateway process. `load_tokenizers`, one per model of the context, run in a thread and in the
    preprocessing processes, so they must pickle. `eager`: preprocessing starts with the server, and not with the first
    large input.

    Raises `SpecError` if a certificate or key file cannot be used.
    """

    def __init__(self, context: GatewayContext, *load_tokenizers: Callable[[], Tokenizer], eager: bool = False) -> None:
        self._eager = eager
        self.guard = Authenticator(context.spec.gateway)  # shared with the HTTP server
        self._context = context
        self._load_tokenizers = load_tokenizers
        self._server: grpc.aio.Server | None = None
        self._health: HealthService | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._models: ServedModels | None = None
        self._limiting: asyncio.Task[None] | None = None  # while it is open

    @property
    def models(self) -> ServedModels:
        """The gateways of an open server; shared with the HTTP server."""
        assert self._models is not None, "open() creates them"
        return self._models

    async def open(self) -> str:
        """Listen. Returns "host:port". Raises OSError if the port is not available, ModelError without a tokenizer."""
        spec = self._context.spec.gateway
        pools, gateways = [], []
        for context, load in zip(self._context.models, self._load_tokenizers, strict=True):
            tokenizer = await asyncio.to_thread(load)
            pools.append(PreprocessingPool(load))
            gateways.append(Gateway(context, tokenizer, pools[-1]))
        models = self._models = ServedModels(self._context, gateways)
        most, per_address = connection_limits(4)
        connections = ConnectionLimit(per_address)
        interceptors: list[grpc.aio.ServerInterceptor] = [
            MessageInterceptor(models.max_requests, connections.close),
            ResponseInterceptor(models),
        ]
        if self.guard.has_keys:
            interceptors.append(KeyInterceptor(self.guard))
        server = grpc.aio.server(
            interceptors=interceptors,
            options=_options(models.max_requests, most),
            maximum_concurrent_rpcs=models.max_requests + MAX_OTHER_CALLS,
        )
        add_inference_service(InferenceService(models, self.guard), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(models), server)
        self._health = HealthService(self._context.queries, ("", INFERENCE), (ADMIN, health.SERVICE_NAME))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection((INFERENCE, ADMIN, health.SERVICE_NAME), server)
        port = _bind(server, spec.host, spec.grpc_port, _credentials(self.guard))
        await server.start()
        connections.port = port
        self._limiting = asyncio.create_task(connections.run())
        for preprocessing in pools if self._eager else ():
            preprocessing.start()
        self._server = server
        return _address(spec.host, port)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests and give running ones `grace_s` to finish; `close` cancels the rest."""
        server, self._server = self._server, None
        if server is not None:
            assert self._health is not None
            self._health.close()
            self._stopping = asyncio.ensure_future(server.stop(grace_s + CUT_S))
        if self._stopping is not None:
            await asyncio.wait([self._stopping], timeout=grace_s)

    async def close(self, grace_s: float) -> None:
        """`drain`, then close the gateways, which cancels what still runs. May be called twice, or before `open`."""
        await self.drain(grace_s)
        if self._limiting is not None:
            self._limiting.cancel()
        if self._models is not None:
            await self._models.close()
        if self._stopping is not None:
            await self._stopping


def _credentials(guard: Authenticator) -> grpc.ServerCredentials | None:
    """TLS with the guard's current files at each new connection. None: no TLS."""
    first = guard.tls
    if first is None:
        return None
    current = first

    def reload() -> Any:
        """None: unchanged."""
        nonlocal current
        latest = guard.tls
        if latest is None or latest is current:
            return None
        current = latest
        return _certificates(latest)

    requires_client = first.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(
        _certificates(first), reload, require_client_authentication=requires_client
    )


def _certificates(tls: Tls) -> Any:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.client_ca)


def _options(max_requests: int, max_connections: int) -> list[tuple[str, int]]:
    return [
        *SERVER_SIZES,
        *KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # by default grpc treats our keepalives as abuse
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", round(OPENING_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
        # Of calls that wait to be read, which are many when a burst arrives, grpc cancels some at random beyond 1000.
        ("grpc.server.max_pending_requests", max_requests + MAX_OTHER_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 3 * (max_requests + MAX_OTHER_CALLS)),
        ("grpc.max_concurrent_streams", max_requests + 64),  # per connection; with room for health, admin, refusals
        ("grpc.so_reuseport", 0),  # a second server on the same port must fail
    ]


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = _address(host, port)
    try:
        bound = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError:
        bound = 0
    if bound == 0:
        number, reason = _bind_error(host, port)
        raise OSError(number, f"cannot listen on {address} ({reason}); choose another gateway.grpc_port")
    return bound


def _bind_error(host: str, port: int) -> tuple[int, str]:
    """The reason of a failed bind, from a plain socket: grpc does not report it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL, error.strerror or str(error)
    return errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
