"""The synchronous client: the methods and types of `AsyncClient`, as blocking calls.

with Client("127.0.0.1:50051", retry=Retry()) as client:
    for event in client.generate("The sea is", max_tokens=32):
        if isinstance(event, TextDelta):
            print(event.text, end="")

An event loop in a background thread runs an `AsyncClient`; several threads may share one `Client`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from diptych.access import Access
from diptych.aio import AsyncClient
from diptych.channel import Interceptors
from diptych.errors import DiptychError
from diptych.retry import Retry

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    call: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    @wraps(call)
    def wait(self: "Client", /, *args: P.args, **options: P.kwargs) -> T:
        return self._wait(call(self._client, *args, **options))

    return wait


def _iterating(
    call: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["Client", P], Generator[T, None, None]]:
    @wraps(call)
    def iterate(self: "Client", /, *args: P.args, **options: P.kwargs) -> Generator[T, None, None]:
        return self._each(call(self._client, *args, **options))

    return iterate


class Client:
    """One connection and its thread. Close it, for example with `with`. Ctrl-C cancels the call, also in the cluster.

    Closing an iterator, or leaving its loop, cancels the request.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        retry: Retry | None = None,
        access: Access | None = None,
        interceptors: Interceptors = (),
    ) -> None:
        async def connect() -> AsyncClient:
            return AsyncClient(endpoint, retry=retry, access=access, interceptors=interceptors)

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diptych-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(connect())
        except BaseException:
            self._stop_loop()
            raise

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all running calls and close the connection."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._stop_loop()

    generate = _iterating(AsyncClient.generate)
    chat = _iterating(AsyncClient.chat)
    batch = _iterating(AsyncClient.batch)
    complete = _blocking(AsyncClient.complete)
    cancel = _blocking(AsyncClient.cancel)
    status = _blocking(AsyncClient.status)
    metrics = _blocking(AsyncClient.metrics)
    trace = _blocking(AsyncClient.trace)
    warm = _blocking(AsyncClient.warm)
    unpin = _blocking(AsyncClient.unpin)
    measure = _blocking(AsyncClient.measure)
    flip = _blocking(AsyncClient.flip)
    drain = _blocking(AsyncClient.drain)
    scale = _blocking(AsyncClient.scale)
    load_adapter = _blocking(AsyncClient.load_adapter)
    unload_adapter = _blocking(AsyncClient.unload_adapter)
    wait_ready = _blocking(AsyncClient.wait_ready)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise DiptychError("CANCELLED", "the client is closed; create another one")
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result()
        finally:
            answer.cancel()  # only has an effect if Ctrl-C interrupted the wait

    def _each(self, events: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                self._wait(events.aclose())


async def _next(events: AsyncGenerator[T, None]) -> T | None:
    return await anext(events, None)
