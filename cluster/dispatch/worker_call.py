"""One worker's part in an attempt: the key that it has there, the calls to it, and whether it may still hold something.

Knows one line; knows no other leg and no order of things.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from cluster.dispatch.worker_client import Said, WorkerClient
from cluster.events import Unservable
from cluster.runtime.interface import WorkerGone, WorkerHandle
from workers.errors import InvalidRequest, Overloaded, UnknownSequence, WorkerClosed, WorkerError
from workers.request import Request

CANCEL_TIMEOUT_S = 5.0

T = TypeVar("T")
Background = Callable[[Coroutine[Any, Any, None]], None]


class AttemptFailed(Exception):
    """This attempt is over without a finish; `worker` is where it failed, `corrupt` that its KV was.

    `refused_s`: the worker is well but has no room, and says when to come again.
    """

    def __init__(self, worker: str, reason: str, *, corrupt: bool = False, refused_s: float | None = None) -> None:
        super().__init__(worker, reason)
        self.refused_s = refused_s
        self.worker = worker
        self.reason = reason
        self.corrupt = corrupt

    def __str__(self) -> str:
        return f"{self.worker}: {self.reason}"


class WorkerCall:
    """Owned by an Attempt. Whoever holds it releases it; that does not wait."""

    def __init__(self, request: Request, line: WorkerClient) -> None:
        self.line = line
        self.request = replace(request, reply_to=line.subscriber)
        self.key = request.key
        self.is_held = False  # the worker may hold something of ours
        self.is_taken = False  # the worker has said that it does

    @property
    def name(self) -> str:
        return self.line.name

    @property
    def handle(self) -> WorkerHandle:
        return self.line.handle

    def hold(self, hear: "Callable[[WorkerCall, Said], None]", prompt_tokens: int) -> None:
        """From now on what the worker says of it goes to `hear`. `prompt_tokens`: what it is to compute."""
        if not self.is_held:
            self.is_held = True
            self.line.join(self.key, lambda _, said: hear(self, said), prompt_tokens)

    def done(self) -> None:
        """The worker holds nothing of ours any more, and may die in peace."""
        self.is_held = self.is_taken = False
        self.line.leave(self.key)

    async def take(self, call: Coroutine[Any, Any, T]) -> T:
        """The call by which the worker takes our key. If the worker refuses, it holds nothing, and nothing is canceled.

        Raises what `call` does.
        """

        async def taking() -> T:
            try:
                return await call
            except (InvalidRequest, Overloaded, UnknownSequence):
                self.done()
                raise

        answer = await self.call(taking())
        self.is_taken = True
        return answer

    async def is_missing(self) -> bool:
        """Whether the worker took our key and no longer has it. Raises `AttemptFailed`."""
        return self.is_held and self.is_taken and not await self.call(self.handle.holds(self.key))

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """A call that fails with its worker, or outlives it, fails the attempt; a caller's mistake is the caller's.

        Raises `AttemptFailed`, also where the worker has no room, and `Unservable`.
        """
        calling = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {calling, self.line.ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise AttemptFailed(self.name, f"the worker was lost ({self.line.lost})")
            return calling.result()
        except (WorkerGone, WorkerClosed) as error:
            self.line.hang_up(f"{type(error).__name__}: {error}")  # now, lest the next attempt goes there again
            raise AttemptFailed(self.name, f"{type(error).__name__}: {error}") from None
        except InvalidRequest as error:
            raise Unservable(str(error)) from None
        except Overloaded as error:
            raise AttemptFailed(self.name, str(error), refused_s=error.retry_after_s) from None
        except (UnknownSequence, WorkerError) as error:
            raise AttemptFailed(self.name, str(error)) from None
        finally:
            calling.cancel()

    def release(self, background: Background) -> None:
        """Let the worker drop what it still holds."""
        was_held = self.is_held
        self.done()
        if was_held and self.line.lost is None:
            background(self._cancel())

    async def _cancel(self) -> None:
        """Best effort: a worker that cannot be told has died, or will drop us as a silent subscriber."""
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self.handle.cancel(self.key)
        except (WorkerGone, WorkerError, TimeoutError):
            return
