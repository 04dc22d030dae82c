"""The HTTP server: one port, served by uvicorn in the gateway's event loop. Knows sockets; knows no request."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.frontend.auth import Authenticator
from cluster.frontend.http.app import make_app
from cluster.frontend.http.connection import BodyReader, Connection
from cluster.frontend.http.listener import listen
from cluster.frontend.http.middleware import WRITER, CountResponses, NameRequests, RequireKey
from cluster.frontend.http.reply import EVENTS
from cluster.frontend.served_models import ServedModels

logger = logging.getLogger(__name__)

METHODS = ("GET", "HEAD", "POST")
# Headers that scripts from other origins may read.
EXPOSED = ("x-request-id", "x-diptych-predicted-ttft-ms", "x-diptych-predicted-tpot-ms", "retry-after")
KEEP_ALIVE_S = 30  # between two requests
HEADERS_BYTES = 64 << 10
PART_BYTES = 8 << 10  # parsed at once: in chunks of one byte that takes h11 10 ms
HEADERS_S = 10.0  # limit for the headers, from the connection or their first byte, and for the rest of a refused body
SEND_S = 60.0  # a client that reads nothing of its response for this long is disconnected
CUT_S = 0.5  # for the responses of cancelled requests
LINGER_S = 2.0  # for a TLS client's close_notify
TICK_S = 1.0  # between updates of the Date header
COMMENT = b":\n\n"  # a comment in an event stream; clients skip it
INTERIM_S = (0.0, 0.1, 1.0, 5.0)  # interim responses after a client's half-close; Go clients accept at most five


class HttpServer:
    """Does not own the gateways. To stop: `drain`, close the gateways, `close`."""

    def __init__(self, models: ServedModels, guard: Authenticator) -> None:
        self._spec = models.spec.gateway
        self._scheme = "http" if guard.tls is None else "https"
        self._closing = False
        app = make_app(models, lambda: self._closing)
        bodies = BodyReader(
            (each.tokenizer.longest_text_bytes, each.limits.bounds.context_length) for each in models.gateways
        )
        self._requests = Connection(app, bodies, models.max_requests + 64, lambda: self._closing)
        checked = RequireKey(self._requests, guard) if guard.has_keys else self._requests
        counted = CountResponses(NameRequests(checked), models.responses)
        origins = self._spec.http_allowed_origins
        config = uvicorn.Config(
            CORSMiddleware(counted, origins, METHODS, ["*"], expose_headers=EXPOSED) if origins else counted,
            http=_Http if guard.tls is None else _Tls,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_context_factory=None if guard.tls is None else lambda config, default: _reloading_context(guard),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Listen; return "http://host:port", or "https://..." with TLS. Raises OSError if the port is not available."""
        assert self._spec.http_port is not None, "HttpServer needs a port"
        listener = listen(self._spec.host, self._spec.http_port)
        port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        starting = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait((self._serving, starting), return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        if self._serving.done():
            self._serving.result()
        host = f"[{self._spec.host}]" if ":" in self._spec.host else self._spec.host
        return f"{self._scheme}://{host}:{port}"

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests and give running ones `grace_s` to finish. Meanwhile it listens, and /ready is 503."""
        self._closing = True
        await self._requests.wait_idle(grace_s)

    async def close(self) -> None:
        """Abort all connections. May be called twice, or before `open`."""
        await self.drain(0.0)
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._server.end()
        await asyncio.wait([serving], timeout=CUT_S)
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.wait([serving], timeout=CUT_S)
        serving.cancel()


class _H11(h11.Connection):
    """h11's connection, extended by whether the response is an event stream and has chunks."""

    streams = has_chunks = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if isinstance(event, h11.Response):
            has_length = any(name == b"content-length" for name, _ in event.headers)
            self.has_chunks = self.their_http_version == b"1.1" and not has_length
            self.streams = (b"content-type", EVENTS.encode()) in event.headers
        return super().send(event)


class _Http(H11Protocol):
    """uvicorn's protocol, with time limits also within a request, and a limit of what is parsed at once."""

    conn: _H11
    _headers_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _is_half_closed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _H11(h11.SERVER, HEADERS_BYTES)
        inner = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await inner({**scope, WRITER: ChunkWriter(self)}, receive, send)

        self.app = app
        self._unparsed = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        is_scheduled = bool(self._unparsed)
        self._unparsed += data
        if not is_scheduled:
            self._parse()

    def _parse(self) -> None:
        """Parse one part, and the next one after other callbacks; meanwhile nothing more is read."""
        if self.transport.is_closing():
            return
        part = bytes(self._unparsed[:PART_BYTES])
        del self._unparsed[:PART_BYTES]
        super().data_received(part)
        if self._unparsed:
            self.flow.read_paused = False  # so that only this resumes
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()
        self._update_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that sent a whole request and then closed its half; it may still read.

        A client that left entirely looks the same until something is written to it. So this writes interim responses,
        or comments in an event stream.
        """
        if self._is_half_closed or not self._is_answering or self.cycle.scope["http_version"] == "1.0":
            return self._is_half_closed
        self._is_half_closed = True
        for delay_s in INTERIM_S:
            self.loop.call_later(delay_s, self._probe)
        return True

    def _probe(self) -> None:
        """Write something. A client that left responds with a reset, and the next write then fails."""
        if self.transport.is_closing() or not self._is_answering:
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            interim = h11.InformationalResponse(status_code=HTTPStatus.PROCESSING, headers=[])
            self.transport.write(self.conn.send(interim) or b"")
        elif self.conn.our_state is h11.SEND_BODY and self.conn.streams:
            self.transport.write(self.conn.send(h11.Data(data=COMMENT)) or b"")

    @property
    def _is_answering(self) -> bool:
        """A request has arrived completely, and its response has not been sent completely."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and not self._is_answering:  # that was its last request
            self.transport.close()
        self._update_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._update_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_S, self._disconnect)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        """Limit the time in which no request runs and uvicorn has no timer; only complete headers stop the timer."""
        is_closing = self.transport.is_closing()
        runs = self.cycle is not None and not self.cycle.response_complete
        if not is_closing and (runs or self.timeout_keep_alive_task is not None):
            if self._headers_timer is not None:
                self._headers_timer.cancel()
                self._headers_timer = None
        elif self._headers_timer is None:  # when closing, the rest of the response may wait for the client
            self._headers_timer = self.loop.call_later(SEND_S if is_closing else HEADERS_S, self.transport.abort)

    def _disconnect(self) -> None:
        logger.info("disconnected a client that read nothing for %.0f s", SEND_S)
        self.transport.abort()


class ChunkWriter:
    """The `BodyWriter` of the connection's current response. h11's state stays the same between two chunks."""

    def __init__(self, protocol: _Http) -> None:
        self._cycle = protocol.cycle
        self._protocol = protocol

    @property
    def is_ready(self) -> bool:
        protocol = self._protocol
        return (
            protocol.cycle is self._cycle
            and protocol.conn.has_chunks
            and protocol.conn.our_state is h11.SEND_BODY
            and not protocol.flow.write_paused
            and not protocol.transport.is_closing()
        )

    def write(self, part: bytes) -> None:
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class _Tls(_Http):
    """Does not wait long for the close_notify of an idle client, which never sends one."""

    def eof_received(self) -> bool:  # type: ignore[override]
        return False  # TLS has no half-closed connections

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._linger()

    def shutdown(self) -> None:
        super().shutdown()
        self._linger()

    def _linger(self) -> None:
        if self.transport.is_closing():
            self.loop.call_later(LINGER_S, self.transport.abort)


class _Server(uvicorn.Server):
    """Embedded uvicorn: without signal handlers, and with a start that can be awaited."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """uvicorn's own one wakes ten times a second to see whether it should exit."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._ending.wait()


def _reloading_context(guard: Authenticator) -> ssl.SSLContext:
    """The context of a listening socket: each handshake uses the guard's current files. Requires a guard with TLS."""
    first = guard.tls
    assert first is not None, "the caller has checked that there is TLS"

    def reload(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        latest = guard.tls
        assert latest is not None, "TLS is never turned off"
        connection.context = latest.context

    first.context.sni_callback = reload
    return first.context
