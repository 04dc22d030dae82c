"""The servers of one gateway process: gRPC, and HTTP if the spec has a port for it."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cluster.frontend.context import GatewayContext
from cluster.frontend.grpc.server import GrpcServer, model_tokenizer
from cluster.frontend.http import check_extra
from cluster.frontend.text import Tokenizer

if TYPE_CHECKING:  # needs the extra `http`
    from cluster.frontend.http.server import HttpServer


class Servers:
    """The `Server` of a gateway process, which owns it. Arguments and errors: see `GrpcServer`."""

    def __init__(
        self, context: GatewayContext, load_tokenizer: Callable[[], Tokenizer], *, eager: bool = False
    ) -> None:
        if context.spec.gateway.http_port is not None:
            check_extra()
        self._context = context
        self._grpc = GrpcServer(context, load_tokenizer, eager=eager)
        self._http: HttpServer | None = None
        self._http_url = ""

    @property
    def http_url(self) -> str:
        return self._http_url

    async def open(self) -> str:
        """Listen. Returns the gRPC endpoint. Errors as of `GrpcServer.open`, for both ports."""
        endpoint = await self._grpc.open()
        if self._context.spec.gateway.http_port is not None:
            try:
                await self._open_http()
            except BaseException:
                await self._grpc.close(0.0)
                raise
        return endpoint

    async def _open_http(self) -> None:
        from cluster.frontend.http.server import HttpServer

        http = HttpServer(self._context, self._grpc.gateway, self._grpc.guard)
        self._http_url = await http.open()
        self._http = http

    async def close(self, grace_s: float) -> None:
        """May be called twice, or before `open`."""
        if self._http is None:
            await self._grpc.close(grace_s)
            return
        await asyncio.gather(self._grpc.drain(grace_s), self._http.drain(grace_s))
        await self._grpc.close(0.0)
        await self._http.close()


def open_servers(context: GatewayContext) -> Servers:
    """The `ServerFactory` of `diptych serve`. A module function, so that it can be pickled."""
    return Servers(context, partial(model_tokenizer, context.model), eager=True)
