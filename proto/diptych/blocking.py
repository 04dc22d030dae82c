"""The client for programs without an event loop: the same calls and types, each waiting for its answer.

with Client("127.0.0.1:50051", retry=Retry()) as client:
    for event in client.generate("The sea is", max_tokens=32):
        if isinstance(event, TextDelta):
            print(event.text, end="")

An event loop in a thread of its own does the work; several threads may use one client.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

from diptych.access import Access
from diptych.aio import AsyncClient
from diptych.channel import Interceptors
from diptych.errors import DiptychError
from diptych.events import Answer, TextEvent
from diptych.history import Window
from diptych.options import BatchOptions, Messages, Prompt, RequestOptions
from diptych.retry import Retry
from diptych.shapes import Shape, Timings
from diptych.status import ClusterStatus
from diptych.view import Role

T = TypeVar("T")


class Client:
    """One connection and its thread. Close it, best with `with`. What waits, Ctrl-C ends, in the cluster as well."""

    def __init__(
        self,
        endpoint: str,
        *,
        retry: Retry | None = None,
        access: Access | None = None,
        interceptors: Interceptors = (),
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diptych-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(_connected(endpoint, retry, access, interceptors))
        except BaseException:
            self._end()
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
        """Ends what still runs on this connection."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self, prompt: Prompt, *, apply_chat_template: bool = False, **options: Unpack[RequestOptions]
    ) -> Generator[TextEvent, None, None]:
        """Go on from text or token ids. Closing the iterator, or leaving its loop, cancels the request."""
        return self._each(self._client.generate(prompt, apply_chat_template=apply_chat_template, **options))

    def chat(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = (), **options: Unpack[RequestOptions]
    ) -> Generator[TextEvent, None, None]:
        """Answer (role, content) messages. Closing the iterator, or leaving its loop, cancels the request."""
        return self._each(self._client.chat(messages, tools=tools, **options))

    def complete(
        self, prompt: Prompt, *, apply_chat_template: bool = False, **options: Unpack[RequestOptions]
    ) -> Answer:
        """As `generate`, in one piece."""
        return self._wait(self._client.complete(prompt, apply_chat_template=apply_chat_template, **options))

    def batch(
        self, prompts: Sequence[Prompt], **options: Unpack[BatchOptions]
    ) -> Generator[tuple[int, Answer | DiptychError], None, None]:
        """(index, answer) as they finish. A prompt that fails gives its error; the others go on."""
        return self._each(self._client.batch(prompts, **options))

    def cancel(self, request_id: str) -> bool:
        """End a request by its id. False: no such request ran in that gateway."""
        return self._wait(self._client.cancel(request_id))

    def status(self, *, audit: bool = False, timeout_s: float = 10.0) -> ClusterStatus:
        """One look at the cluster; see `AsyncClient.status`."""
        return self._wait(self._client.status(audit=audit, timeout_s=timeout_s))

    def metrics(self, *, timeout_s: float = 10.0) -> str:
        """The gateway's metrics in Prometheus' text format."""
        return self._wait(self._client.metrics(timeout_s=timeout_s))

    def trace(
        self, *, last_s: float | None = None, begin_unix_ns: int = 0, end_unix_ns: int = 0, timeout_s: float = 60.0
    ) -> tuple[str, Window]:
        """What the gateway remembers; see `AsyncClient.trace`."""
        asked = self._client.trace(
            last_s=last_s, begin_unix_ns=begin_unix_ns, end_unix_ns=end_unix_ns, timeout_s=timeout_s
        )
        return self._wait(asked)

    def measure(self, worker: str, shape: Shape, repeats: int = 1, *, timeout_s: float = 150.0) -> Timings:
        """Have an idle worker time steps of this shape; see `AsyncClient.measure`."""
        return self._wait(self._client.measure(worker, shape, repeats, timeout_s=timeout_s))

    def flip(self, worker: str, role: Role, *, revision: int = 0, timeout_s: float = 90.0) -> int:
        """Give a ready worker another role; see `AsyncClient.flip`."""
        return self._wait(self._client.flip(worker, role, revision=revision, timeout_s=timeout_s))

    def drain(self, worker: str, *, deadline_s: float | None = None, revision: int = 0, timeout_s: float = 90.0) -> int:
        """Let a worker go; see `AsyncClient.drain`."""
        return self._wait(self._client.drain(worker, deadline_s=deadline_s, revision=revision, timeout_s=timeout_s))

    def scale(self, pool: str, replicas: int, *, revision: int = 0, timeout_s: float = 90.0) -> int:
        """Let a pool have so many workers; see `AsyncClient.scale`."""
        return self._wait(self._client.scale(pool, replicas, revision=revision, timeout_s=timeout_s))

    def wait_ready(self, timeout_s: float) -> None:
        """Return when a worker is ready."""
        self._wait(self._client.wait_ready(timeout_s))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise DiptychError("CANCELLED", "the client is closed; make another one")
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result()
        finally:
            answer.cancel()  # where the wait was broken off; else it does nothing

    def _each(self, events: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                self._wait(events.aclose())


async def _connected(
    endpoint: str, retry: Retry | None, access: Access | None, interceptors: Interceptors
) -> AsyncClient:
    return AsyncClient(endpoint, retry=retry, access=access, interceptors=interceptors)


async def _next(events: AsyncGenerator[T, None]) -> T | None:
    return await anext(events, None)
