"""One thread for many sockets.

    steps     a generator; each step makes one system call that moves data, as much as there is
    yields    until when it waits for its socket, or `AGAIN`: after a step of each other socket
    is sent   whether no other socket moves data: then the next call may block for `SLICE_S`
    ended     is called once, when the steps have returned or raised

A step waits only after a call that moved less than it could have, because events report only changes. It may be resumed
without an event, and then makes its call again. This happens once when its peer has closed: that event may come before
the call that gets the last bytes, and such a call does not report the end. Knows sockets and time; knows no frames.
"""

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from kvtransfer.errors import TransferTimeout

T = TypeVar("T")
Steps: TypeAlias = Generator[float, bool, T]

logger = logging.getLogger(__name__)

IDLE = math.inf  # waits for its socket, and moves nothing until then
AGAIN = -math.inf
SLICE_S = 0.002
_CLOSED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class _Task:
    def __init__(self, steps: Steps[None], ended: Callable[[Exception | None], None]) -> None:
        self.steps = steps
        self.ended = ended
        self.has_begun = False
        self.stop_s = IDLE
        self.peer_closed = False  # since its latest wait


class Poller:
    """Owns its thread, not the sockets: `ended` closes them. `close` it.

    `watch`, `start` and `stop` are for the poller's thread only: in steps, in `ended`, or through `call`.
    """

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._tasks: dict[int, _Task] = {}  # by the socket's descriptor
        self._again: deque[tuple[int, _Task]] = deque()
        self._num_moving = 0  # tasks that are not idle
        self._next_stop_s = IDLE  # no later than any task's
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_waking = False
        self._closing = False
        self._epoll.register(
            self._wake, select.EPOLLIN | select.EPOLLET
        )  # an event for each write, so it is never read
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, action: Callable[[], None]) -> None:
        """Run it on the poller's thread, in the order of the calls. Safe for threads. Ignored after `close`."""
        self._calls.append(action)
        if not self._is_waking:
            self._is_waking = True
            os.eventfd_write(self._wake, 1)

    def watch(self, link: socket.socket) -> None:
        """Register a new socket, once; it is forgotten when it is closed. Raises `OSError`."""
        self._epoll.register(link.fileno(), _EVENTS)

    def start(self, link: socket.socket, steps: Steps[None], ended: Callable[[Exception | None], None]) -> None:
        """Run the steps of a watched socket that has none. `ended` gets the error that they raised, or None."""
        task = self._tasks[link.fileno()] = _Task(steps, ended)
        self._resume(link.fileno(), task)

    def stop(self, link: socket.socket, error: Exception) -> None:
        """Raise the error in the socket's steps, if it has any."""
        task = self._tasks.get(link.fileno())
        if task is not None:
            self._resume(link.fileno(), task, error)

    def close(self, limit_s: float) -> None:
        """Stop all steps. Blocks until the thread has ended: call it off the event loop. May be repeated.

        Raises `TransferTimeout`.
        """
        if self._thread.is_alive():
            self.call(self._close)
            self._thread.join(limit_s)
            if self._thread.is_alive():
                name = self._thread.name
                raise TransferTimeout(f"the thread {name} has not ended within {limit_s:g} s: end this process")
            self._is_waking = True  # late calls are ignored
            os.close(self._wake)

    def _close(self) -> None:
        self._closing = True

    def _run(self) -> None:
        while not self._closing:
            self._turn()
        for descriptor, task in list(self._tasks.items()):
            self._resume(descriptor, task, ConnectionError("this end was closed"))
        self._epoll.close()

    def _turn(self) -> None:
        """Wait for events, and run one step of each socket that has one."""
        again, self._again = self._again, deque()
        wait_s = 0.0 if again else max(0.0, self._next_stop_s - time.monotonic())
        for descriptor, events in self._epoll.poll(None if wait_s == IDLE else wait_s):
            if descriptor == self._wake:
                self._run_calls()
            elif (task := self._tasks.get(descriptor)) is not None:
                task.peer_closed |= bool(events & _CLOSED)
                if task.stop_s != AGAIN:
                    self._resume(descriptor, task)
        for descriptor, task in again:
            if self._tasks.get(descriptor) is task:
                self._resume(descriptor, task)
        if self._next_stop_s <= time.monotonic():
            self._expire()

    def _run_calls(self) -> None:
        self._is_waking = False
        while self._calls:
            _guarded(self._calls.popleft())

    def _expire(self) -> None:
        now_s = time.monotonic()
        for descriptor, task in list(self._tasks.items()):
            if AGAIN < task.stop_s <= now_s and self._tasks.get(descriptor) is task:
                self._resume(descriptor, task, TimeoutError("nothing came in time"))
        self._next_stop_s = min((task.stop_s for task in self._tasks.values() if task.stop_s != AGAIN), default=IDLE)

    def _resume(self, descriptor: int, task: _Task, error: Exception | None = None) -> None:
        moved = task.stop_s != IDLE
        try:
            if error is not None:
                task.stop_s = task.steps.throw(error)
            elif task.has_begun:
                task.stop_s = task.steps.send(self._num_moving == moved)
            else:
                task.has_begun, task.stop_s = True, next(task.steps)
        except Exception as failure:
            self._num_moving -= moved
            del self._tasks[descriptor]
            reason = None if isinstance(failure, StopIteration) else failure
            _guarded(lambda: task.ended(reason))
            return
        if task.peer_closed and task.stop_s != AGAIN:
            task.peer_closed, task.stop_s = False, AGAIN
        self._num_moving += (task.stop_s != IDLE) - moved
        if task.stop_s == AGAIN:
            self._again.append((descriptor, task))
        else:
            self._next_stop_s = min(self._next_stop_s, task.stop_s)


def pause(seconds: float) -> Steps[None]:
    stop_s = time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        while True:
            yield stop_s


def _guarded(action: Callable[[], None]) -> None:
    """Log an unexpected error; the thread goes on."""
    try:
        action()
    except Exception:
        logger.exception("unexpected error on thread %s", threading.current_thread().name)
