"""Opens channels to a gateway: plain or TLS, by its address; adds the API key to every call, if there is one."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from diptych.access import Access
from diptych.errors import DiptychError
from diptych.wire import CLIENT_SIZES, KEEPALIVE, RECONNECTING

PLAIN, SECURE = "grpc://", "grpcs://"


class KeyedChannel:
    """A channel that adds the API key to calls; for the two kinds of calls that our services have."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {key}"),)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.unary_unary(*args, **options), metadata=self._metadata)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.unary_stream(*args, **options), metadata=self._metadata)

    async def close(self) -> None:
        await self._channel.close()


Interceptors = Sequence[grpc.aio.ClientInterceptor]


def open_channel(endpoint: str, access: Access, interceptors: Interceptors = ()) -> Any:
    """A channel to `HOST:PORT` or `grpc://HOST:PORT`, or with TLS to `grpcs://HOST:PORT`.

    Raises OSError if a file cannot be read, `DiptychError` if `access` does not fit the address.
    """
    if endpoint.startswith(("http://", "https://")):
        advice = f"write HOST:PORT, or {SECURE}HOST:PORT for TLS, with the port of gRPC"
        raise DiptychError("INVALID_ARGUMENT", f"{endpoint} is no address of gRPC; {advice}", field="endpoint")
    secure, address = endpoint.startswith(SECURE), host_port(endpoint)
    if access.has_files and not secure:
        problem = f"{endpoint} is without TLS, so neither a CA nor a certificate has an effect"
        advice = f"write {SECURE}{address}, or leave them out"
        raise DiptychError("INVALID_ARGUMENT", f"{problem}; {advice}", field="endpoint")
    options: list[tuple[str, Any]] = [*CLIENT_SIZES, *KEEPALIVE, *RECONNECTING]
    if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy cannot reach this machine's loopback
    channel = (
        grpc.aio.secure_channel(address, _credentials(access), options=options, interceptors=interceptors)
        if secure
        else grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    )
    return KeyedChannel(channel, access.key) if access.key else channel


def host_port(endpoint: str) -> str:
    return endpoint.removeprefix(PLAIN).removeprefix(SECURE)


def _credentials(access: Access) -> grpc.ChannelCredentials:
    authorities, key, certificate = (
        None if path is None else Path(path).read_bytes()
        for path in (access.ca_file, access.key_file, access.cert_file)
    )
    return grpc.ssl_channel_credentials(authorities, key, certificate)
