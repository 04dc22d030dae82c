"""The servers of one gateway process: gRPC, and HTTP if the spec has a port for it.

Imports their libraries only when they open, because the process that starts gateways does not need them.
"""

import asyncio
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING

from cluster.frontend.context import GatewayContext
from cluster.frontend.http import check_extra
from cluster.spec import ClusterSpec

if TYPE_CHECKING:
    from cluster.frontend.http.server import HttpServer  # needs the extra `http`
    from cluster.frontend.text import Tokenizer

MAX_TOKENIZERS = 8  # kept between `preload` and `open`; further ones are loaded twice


class Servers:
    """The `Server` of a gateway process, which owns it. Arguments and errors: see `GrpcServer`."""

    def __init__(
        self, context: GatewayContext, *load_tokenizers: "Callable[[], Tokenizer]", eager: bool = False
    ) -> None:
        from cluster.frontend.grpc.server import GrpcServer

        if context.spec.gateway.http_port is not None:
            check_extra()
        self._context = context
        self._grpc = GrpcServer(context, *load_tokenizers, eager=eager)
        self._http: HttpServer | None = None
        self.http_url = ""

    async def open(self) -> str:
        """Listen. Returns the gRPC endpoint. Errors as of `GrpcServer.open`, for both ports."""
        endpoint = await self._grpc.open()
        if self._context.spec.gateway.http_port is not None:
            try:
                from cluster.frontend.http.server import HttpServer

                http = HttpServer(self._grpc.models, self._grpc.guard)
                self.http_url = await http.open()
            except BaseException:
                await self._grpc.close(0.0)
                raise
            self._http = http
        return endpoint

    async def close(self, grace_s: float) -> None:
        """May be called twice, or before `open`."""
        if self._http is None:
            await self._grpc.close(grace_s)
            return
        await asyncio.gather(self._grpc.drain(grace_s), self._http.drain(grace_s))
        await self._grpc.close(0.0)
        await self._http.close()


def preload(spec: ClusterSpec) -> None:
    """Import what the servers need, and load the tokenizers. Raises `ModelError` or `RuntimeUnavailable`."""
    from workers.model.store import read_model_config, resolve

    import_module("cluster.frontend.grpc.server")
    if spec.gateway.http_port is not None:
        check_extra()
        import_module("cluster.frontend.http.server")
    for model in spec.models:
        load_tokenizer(model, read_model_config(resolve(model).path).context_length)


@lru_cache(maxsize=MAX_TOKENIZERS)
def load_tokenizer(model: str, context_length: int) -> "Tokenizer":
    """The tokenizer of a served model. Raises `ModelError`."""
    from workers.model.store import resolve
    from workers.model.tokenizer import ModelTokenizer

    return ModelTokenizer(resolve(model).path, context_length)


def open_servers(context: GatewayContext) -> Servers:
    """The `ServerFactory` of `diptych serve`. A module function, so that it can be pickled."""
    models = (each.model for each in context.models)
    loads = (partial(load_tokenizer, model.name, model.context_length) for model in models)
    return Servers(context, *loads, eager=True)
