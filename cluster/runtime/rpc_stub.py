"""A stub of one incarnation of a worker in another process: all calls share one connection."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from cluster.runtime.runtime_errors import NoAnswer, WorkerGone
from kvtransfer.errors import TransferError
from workers.request import DeferredReader, EngineOutputs
from workers.rpc import CONNECT_S, METHODS, WorkerConnection

CALL_TIMEOUT_S = 10.0
DISCONNECTED = "this end closed the connection"
TIMED = ("reserve", "fetch_prefix", "warm")  # their last argument is the worker's own limit
TIMEOUTS_S = {
    **dict.fromkeys(METHODS, CALL_TIMEOUT_S),
    "connect": 60.0,
    "measure": 130.0,  # longer than the worker's own limit
}


class RpcAddress(NamedTuple):
    """Where a worker listens, and the secret that admits callers."""

    host: str
    port: int
    secret: bytes


class RpcStub:
    """A `WorkerStub`. `locate` asks for the worker's address; the first call connects.

    Calls raise `WorkerGone` if the process is gone, `NoAnswer` in time.
    """

    def __init__(self, name: str, incarnation: str, locate: Callable[[], Awaitable[RpcAddress]]) -> None:
        self.name = name
        self._incarnation = incarnation
        self._locate = locate
        self._on_outputs: Callable[[EngineOutputs], object] = _ignore
        self._opening: asyncio.Task[WorkerConnection] | None = None
        self._connection: WorkerConnection | None = None  # once it is open
        self._closed = False

    async def disconnect(self) -> None:
        """Close the connection. Calls that wait, and later ones, raise `WorkerGone`."""
        self._closed, self._connection = True, None
        opening = self._opening
        if opening is None:
            return
        if not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
        if opening.exception() is None:
            await opening.result().close()

    async def subscribe(
        self, subscriber: str, on_outputs: Callable[[EngineOutputs], object], *, deferred: DeferredReader | None = None
    ) -> None:
        """Once for each stub. The caller watches for silence: this call has no timeout."""
        self._on_outputs = on_outputs
        try:
            connection = await self._connected()
            await connection.subscribe(subscriber)
        finally:
            self._on_outputs = _ignore

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """The other methods; `WorkerStub` has their types."""
        if method not in METHODS:
            raise AttributeError(f"a worker has no method {method!r}")
        if method in TIMED:
            return lambda *args: self._call(method, *args, timeout_s=args[-1] + CALL_TIMEOUT_S)
        return partial(self._call, method, timeout_s=TIMEOUTS_S[method])

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            connection = self._connection or await self._connected()
            return await connection.call(method, args, timeout_s)
        except TimeoutError:
            raise NoAnswer(f"no answer within {timeout_s:.1f} s") from None

    async def _connected(self) -> WorkerConnection:
        if self._closed:
            raise WorkerGone(DISCONNECTED)
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        connection = await asyncio.shield(self._opening)
        self._connection = None if self._closed else connection
        return connection

    async def _open(self) -> WorkerConnection:
        try:
            host, port, secret = await self._locate()
            return await WorkerConnection.open(
                self.name,
                host,
                port,
                secret,
                self._incarnation,
                WorkerGone,
                lambda message: self._on_outputs(message),
            )
        except TimeoutError:
            raise NoAnswer(f"no connection within {CONNECT_S:.1f} s") from None
        except (TransferError, OSError, EOFError) as error:
            raise WorkerGone(f"its process ended, or cannot be reached: {error}") from None
        except asyncio.CancelledError:  # by `disconnect`; it must not look like a cancellation of those who wait
            raise WorkerGone(DISCONNECTED) from None


def _ignore(message: EngineOutputs) -> None:
    """Nobody listens."""
