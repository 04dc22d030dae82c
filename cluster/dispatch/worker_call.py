"""The calls of an attempt to one of its workers, and whether that worker may still hold something. Knows no order of
calls.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cluster.dispatch.worker_client import Message, WorkerClient
from cluster.events import Unservable
from cluster.runtime.interface import WorkerStub
from cluster.runtime.runtime_errors import WorkerGone
from workers.errors import InvalidRequest, Overloaded, UnknownSequence, WorkerClosed, WorkerError
from workers.request import Request

CANCEL_TIMEOUT_S = 5.0

T = TypeVar("T")
Background = Callable[[Coroutine[Any, Any, None]], object]


class AttemptFailed(Exception):
    """An attempt failed at `worker`. `corrupt`: its KV was corrupt.

    `refused_s`: the worker is healthy but has no room; retry after this many seconds. `no_memory`: as in `FailedOut`.
    """

    def __init__(
        self,
        worker: str,
        reason: str,
        *,
        corrupt: bool = False,
        refused_s: float | None = None,
        no_memory: bool = False,
    ) -> None:
        super().__init__(worker, reason)
        self.refused_s = refused_s
        self.no_memory = no_memory
        self.worker = worker
        self.reason = reason
        self.corrupt = corrupt

    def __str__(self) -> str:
        return f"{self.worker}: {self.reason}"


class WorkerCall:
    """Owned by an Attempt or a migration, which must release it."""

    def __init__(self, *, request: Request, worker: WorkerClient) -> None:
        self.worker = worker
        self.request = replace(request, reply_to=worker.subscriber)
        self.key = request.key
        self.is_held = False  # the worker may hold something for this key
        self.is_taken = False  # the worker confirmed that it has the key

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def handle(self) -> WorkerStub:
        return self.worker.handle

    def hold(self, on_message: "Callable[[WorkerCall, Message], None]", *, prompt_tokens: int) -> None:
        """Subscribe `on_message` to the worker's messages. `prompt_tokens`: the number that it has to compute."""
        if not self.is_held:
            self.is_held = True
            self.worker.join(self.key, partial(on_message, self), prompt_tokens)

    def redirect(self, on_message: "Callable[[WorkerCall, Message], None]") -> None:
        """Replace the subscriber."""
        self.worker.redirect(self.key, partial(on_message, self))

    def report(self) -> None:
        """Take the tokens that a worker in this process has not reported yet."""
        self.worker.report(self.key)

    def done(self) -> None:
        """The worker holds nothing any more; its death no longer matters."""
        self.is_held = self.is_taken = False
        self.worker.leave(self.key)

    async def take(self, call: Coroutine[Any, Any, T]) -> T:
        """Run the call that sends the key to the worker. A worker that refuses holds nothing. Errors: see `call`."""
        answer = await self.call(call, refused=self.done)
        self.is_taken = True
        return answer

    async def is_missing(self) -> bool:
        """Whether the worker had the key and no longer has it. Raises `AttemptFailed`."""
        if not (self.is_held and self.is_taken) or self.worker.num_unreported(self.key):
            return False
        return not await self.call(self.handle.holds(self.key))

    async def call(self, call: Coroutine[Any, Any, T], refused: Callable[[], None] = lambda: None) -> T:
        """Run a call to the worker. Raises `AttemptFailed` if the worker is lost or has no room, and `Unservable` for
        invalid requests. `refused` is called if the worker does not take what was sent.
        """
        try:
            return await self._while_alive(call)
        except (WorkerGone, WorkerClosed) as error:
            self.worker.give_up(f"{type(error).__name__}: {error}")  # now, so that the next attempt does not use it
            raise AttemptFailed(self.name, f"{type(error).__name__}: {error}") from None
        except InvalidRequest as error:
            refused()
            raise Unservable(str(error)) from None
        except Overloaded as error:
            refused()
            raise AttemptFailed(self.name, str(error), refused_s=error.retry_after_s) from None
        except UnknownSequence as error:
            refused()
            raise AttemptFailed(self.name, str(error)) from None
        except WorkerError as error:
            raise AttemptFailed(self.name, str(error)) from None

    async def _while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """Run the call in this task, which is cancelled if the worker is lost meanwhile (as `asyncio.timeout` does)."""
        worker, task = self.worker, asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        if worker.lost is not None:
            call.close()
            raise AttemptFailed(self.name, f"the worker was lost ({worker.lost})")
        worker.callers.add(task)
        try:
            return await call
        except asyncio.CancelledError:
            if worker.lost is None or task.uncancel() > num_cancels:
                raise
            raise AttemptFailed(self.name, f"the worker was lost ({worker.lost})") from None
        finally:
            worker.callers.discard(task)

    def release(self, background: Background) -> None:
        """Cancel at the worker, if it may hold something. Does not wait."""
        was_held = self.is_held
        self.done()
        if was_held and self.worker.lost is None:
            background(self._cancel())

    async def _cancel(self) -> None:
        """Best effort: a worker that does not answer has died, or drops silent subscribers by itself."""
        with suppress(WorkerGone, WorkerError, TimeoutError):
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self.handle.cancel(self.key)
