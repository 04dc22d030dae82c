"""An asyncio event loop in virtual time: when nothing can run now, the clock jumps to the next timer.

Code that takes its time from the loop runs unchanged. Timers of one instant run in the order in which they were set,
and no real clock, socket or thread is used, so the same program gives the same run, to the bit. When nothing can ever
run again, the loop raises `Deadlock`, which names the waiting tasks.

Source of the idea: loops whose clock jumps, as in trio's and FoundationDB's tests.
"""

import asyncio
import heapq
from collections.abc import Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NoReturn, TypeVar

from cluster.offline.sim.network import Network

T = TypeVar("T")

MIN_SWEPT = 100
MAX_NAMED = 12


class Deadlock(RuntimeError):
    """Nothing can run any more, but tasks still wait; the message names them."""


class _Handle(list[Any]):
    """When, a number that keeps equals in order, the context, and the call; None once it ran or was cancelled.

    A list, since a heap compares lists without calling Python.
    """

    __slots__ = ("_loop",)
    _loop: "VirtualLoop"

    def cancel(self) -> None:
        if self[3] is not None:
            self[3] = None
            if self[1]:
                self._loop._timer_cancelled()


class VirtualLoop(asyncio.BaseEventLoop):
    """Owned by `run`. `time()` begins at 0 and only jumps."""

    _ready: Any  # the base class's: handles that may run now
    _stopping: bool  # the base class's

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers: list[_Handle] = []  # a heap
        self._number = 0
        self._num_cancelled = 0
        self._network = Network(self)

        # As the base class's, without a call of Python: there is no debug mode and no task factory.
        self.get_debug = bool  # type: ignore[method-assign]
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self.create_task = partial(asyncio.Task, loop=self)  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now_s

    now_s = time  # see `diptych.clock`

    def call_soon(self, *call: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        handle = _Handle((0.0, 0, copy_context() if context is None else context, call))  # an empty one is false
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, *call: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        return self.call_at(self._now_s + delay, *call, context=context)

    def call_at(self, when: float, *call: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        self._number += 1
        handle = _Handle((when, self._number, copy_context() if context is None else context, call))
        handle._loop = self
        heapq.heappush(self._timers, handle)
        return handle

    def _timer_cancelled(self) -> None:
        """Sweep cancelled timers once they are half of all: most timers are deadlines that were met."""
        self._num_cancelled += 1
        if self._num_cancelled > MIN_SWEPT and 2 * self._num_cancelled > len(self._timers):
            self._timers = [each for each in self._timers if each[3] is not None]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def _run_once(self) -> None:
        """Run until stopped. The base class calls this in a loop."""
        while not self._stopping:
            self._run_ready()

    def _run_ready(self) -> None:
        """Run what is ready; if nothing is, jump to the next timer first."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][3] is None:
            heapq.heappop(timers)
            self._num_cancelled -= 1
        if not ready:
            if not timers:
                raise Deadlock(f"nothing is left to wait for at {self._now_s:.6f} s, but {_waiters(self)}")
            self._now_s = max(self._now_s, timers[0][0])
        now_s = self._now_s
        while timers and timers[0][0] <= now_s:
            handle = heapq.heappop(timers)
            if handle[3] is None:
                self._num_cancelled -= 1
            else:
                handle[1] = 0  # its cancellation no longer counts
                ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if (call := handle[3]) is not None:
                handle[3] = None
                try:
                    handle[2].run(*call)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"in {call[0]}", "exception": error})

    # ---- no world outside ----------------------------------------------------------------------------------------

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return self._network.listen(protocol_factory, port or 0)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return self._network.connect(protocol_factory, port)

    def call_soon_threadsafe(self, *call: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        return self.call_soon(*call, context=context)  # there are no other threads

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time has no threads, whose work would take real time")

    def _process_events(self, event_list: Any) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """No thread waits in a selector."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end of `main` in virtual time. Raises `Deadlock`, or what `main` raised."""
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))


def _waiters(loop: VirtualLoop) -> str:
    """Each task and the line it waits in."""
    lines = sorted(f"{task.get_name()} in {_place(task)}" for task in asyncio.all_tasks(loop))
    more = f" and {len(lines) - MAX_NAMED} more" if len(lines) > MAX_NAMED else ""
    return f"{len(lines)} tasks wait: {'; '.join(lines[:MAX_NAMED])}{more}"


def _place(task: "asyncio.Task[Any]") -> str:
    """The innermost coroutine outside asyncio: file and line."""
    here: Any = task.get_coro()
    place = getattr(here, "__qualname__", "?")
    while here is not None:
        frame = getattr(here, "cr_frame", None) or getattr(here, "ag_frame", None)
        if frame is None:
            break
        name = frame.f_code.co_filename.replace("\\", "/")
        if "/asyncio/" not in name:
            place = f"{frame.f_code.co_qualname} ({'/'.join(name.split('/')[-2:])}:{frame.f_lineno})"
        here = getattr(here, "cr_await", None) or getattr(here, "ag_await", None)
    return place
