"""The messages of an attempt's workers, in order. If none arrives for long, it asks whether the workers still have the
request. Knows no order of calls.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from cluster.dispatch.worker_call import AttemptFailed, WorkerCall
from cluster.dispatch.worker_client import Message

LIVENESS_S = 5.0  # after this long without a message, ask the workers whether they still have the request


class MessageQueue:
    """Owned by an Attempt, which it does not refer to: requests end often, and cycles are freed late.

    Bounded by the attempt's tokens. An exception in it is one that a callback raised.
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[WorkerCall, Message | Exception]] = deque()
        self._is_filled = asyncio.Event()
        self.num_received = 0  # including those that did not need to wait here
        self._num_before = 0  # at the last check
        self._missing_before: list[WorkerCall] = []
        self._timer: asyncio.TimerHandle | None = None  # of the next check
        self._is_check_due = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, call: WorkerCall, message: Message | Exception) -> None:
        self._messages.append((call, message))
        self._is_filled.set()

    def pop(self) -> tuple[WorkerCall, Message | Exception]:
        """The oldest message; `wait` before."""
        oldest = self._messages.popleft()
        if not self._messages:
            self._is_filled.clear()
        return oldest

    async def wait(self, expected_from: Callable[[], Iterable[WorkerCall]]) -> None:
        """Wait for a message. `expected_from` returns the calls whose workers must send the next one.

        Raises `AttemptFailed` if such a worker no longer has the request.
        """
        while not self._messages:
            if self._is_check_due:
                self._timer, self._is_check_due = None, False
                self._is_filled.clear()
                await self._check(expected_from)
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LIVENESS_S, self._check_now)
            else:
                await self._is_filled.wait()

    def _check_now(self) -> None:
        self._is_check_due = True
        self._is_filled.set()

    async def _check(self, expected_from: Callable[[], Iterable[WorkerCall]]) -> None:
        """The request must be missing at two checks without a message between them: the last one may be in transit."""
        missing: list[WorkerCall] = []
        if self.num_received == self._num_before:
            missing = [call for call in dict.fromkeys(expected_from()) if await call.is_missing()]
            for call in missing:
                if call in self._missing_before:
                    raise AttemptFailed(call.name, "the worker no longer has the request")
        self._num_before, self._missing_before = self.num_received, missing

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
