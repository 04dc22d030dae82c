"""One read, shared by the event loop that requested it and the backend that moves its bytes.

    in flight ──> complete  (done = stats)           ──> settled
       ├────────> failed    (done = error)           ──> settled
       └────────> overdue   (done = TransferTimeout) ··> settled, when the backend writes nothing any more

Methods but `begin` run on the event loop; `post` calls them from other threads.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvtransfer.errors import PeerLost, TransferTimeout
from kvtransfer.rpc.connection import observe
from kvtransfer.transport import Copies, Read, ReadStats

T = TypeVar("T")

NO_COPIES: Copies = np.empty((0, 3), np.int64)


class PendingRead:
    """A read's futures and deadline. Owned by its backend until `settle`. `overdue`: what stops it; None: `abandon`."""

    def __init__(
        self, peer: str, copies: Copies, deadline_s: float, overdue: "Callable[[PendingRead], None] | None" = None
    ) -> None:
        self.peer = peer
        self.copies = copies
        self.num_bytes = int(copies[:, 2].sum())
        self._loop = asyncio.get_running_loop()
        self._overdue = overdue or PendingRead.abandon
        self.deadline_s = deadline_s
        self._lock = threading.Lock()  # a read either begins, or is abandoned before, and then writes nothing
        self._has_begun = self._is_abandoned = False
        self.read = Read(self._loop.create_future(), self._loop.create_future())
        self.read.done.add_done_callback(observe)
        self._timer = self._loop.call_later(deadline_s, self._expire)

    def begin(self) -> bool:
        """On the backend's thread: whether the read may begin. It may not once it is abandoned."""
        with self._lock:
            self._has_begun = not self._is_abandoned
            return self._has_begun

    def abandon(self) -> None:
        """A read that has not begun never begins, and settles; one that has begun settles when it ends."""
        with self._lock:
            self._is_abandoned = True
        if not self._has_begun:
            self.settle()

    def complete(self, seconds: float) -> None:
        """All bytes have arrived: done and settled."""
        if not self.read.done.done():
            self.read.done.set_result(ReadStats(self.num_bytes, len(self.copies), seconds))
        self.settle()

    def fail(self, error: Exception) -> None:
        """The read failed, but may still write: `settle` follows."""
        self._timer.cancel()
        if not self.read.done.done():
            self.read.done.set_exception(error)

    def abort(self, error: Exception) -> None:
        """The read failed and writes nothing any more."""
        self.fail(error)
        self.settle()

    def drop(self) -> None:
        """The peer was dropped: the read fails, and settles like one past its deadline."""
        self.fail(PeerLost(f"{self.peer} was dropped while {self.num_bytes} bytes were being read"))
        self._overdue(self)

    def settle(self) -> None:
        self._timer.cancel()
        if not self.read.settled.done():
            self.read.settled.set_result(None)

    def post(self, action: Callable[..., None], *arguments: object) -> None:
        """Run a method of this read on the event loop, from another thread."""
        call_loop(self._loop, action, *arguments)

    def _expire(self) -> None:
        self.fail(
            TransferTimeout(
                f"{self.num_bytes} bytes from {self.peer} did not arrive within {self.deadline_s} s: the target "
                "blocks stay quarantined until the read settles; compute the prompt again or ask another owner"
            )
        )
        self._overdue(self)


async def ended(work: "concurrent.futures.Future[T]", limit_s: float, failure: str) -> T:
    """The result of work on another thread, which goes on if nobody waits for it. Raises `TransferTimeout`."""
    waiting = asyncio.wrap_future(work)
    waiting.add_done_callback(observe)
    _, running = await asyncio.wait([waiting], timeout=limit_s)
    if running:
        raise TransferTimeout(failure)
    return waiting.result()


def call_loop(loop: asyncio.AbstractEventLoop, action: Callable[..., None], *arguments: object) -> None:
    """`call_soon_threadsafe` that ignores a closed loop."""
    if loop.is_closed():
        return
    try:
        loop.call_soon_threadsafe(action, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
