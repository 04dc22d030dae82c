"""Runs a command's work and its cluster, and stops both on Ctrl-C or SIGTERM.

The first signal cancels the work; its `finally` blocks run, and running requests get some time to finish. The second
signal cancels those requests or, before the cluster serves, kills all child processes. Later signals are ignored.

systemd, a container runtime or a terminal may signal Ray's processes as well, and they may die. Calls to a Ray that has
ended block this process for a minute, so it ends without them.
"""

import asyncio
import logging
import os
import select
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import psutil

    from cluster.serving import Serving
    from cluster.spec import ClusterSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
GONE = "the cluster is gone: its controller does not answer any more"
GRACE = "Time that running requests get to finish after Ctrl-C or SIGTERM; a second one cuts them."
RAY_SERVER = "gcs_server"  # the process that all calls to a local Ray need
RAY_PROCESSES = (RAY_SERVER, "raylet")  # a local Ray does not survive the end of either
RAY_GONE_S = 3.0  # from its end until this process ends; `ray.shutdown` ends it, too, and returns sooner


class Interrupts:
    """Signal handlers of one task: the first signal cancels it, the second one cancels what `run_close` waits for.

    Uses Python's handlers rather than the loop's. They stay until the process ends, so a late signal cannot interrupt
    the shutdown of Ray or of the interpreter. A newer `Interrupts` replaces the handlers.
    """

    def __init__(self, *, serves: bool = False) -> None:
        """Handles signals for the running task. `serves`: it will call `run_close`; else a second signal kills."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._second_signal = asyncio.Event()
        self._serves = serves
        self._received = 0
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    async def run_close(
        self, close: Coroutine[Any, Any, None], cancel_requests: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `close` to its end. A second signal runs `cancel_requests` at the same time."""
        closing, interrupted = asyncio.ensure_future(close), asyncio.ensure_future(self._second_signal.wait())
        await asyncio.wait([closing, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if interrupted.cancel():
            await closing
        else:
            await asyncio.gather(closing, cancel_requests())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received += 1
        if self._loop.is_closed() or self._received > 2:
            return
        if self._received == 1:
            threading.Thread(target=_end_after_ray, daemon=True).start()
            self._loop.call_soon_threadsafe(self._task.cancel)
        elif self._serves:
            self._loop.call_soon_threadsafe(self._second_signal.set)
        else:
            _end_at_once(_children(), 128 + signal.SIGINT)  # the start of Ray cannot be interrupted otherwise


def _children() -> "list[psutil.Process]":
    """Of this process, and theirs."""
    try:
        import psutil
    except ImportError:  # then there is no Ray either
        return []
    return psutil.Process().children(recursive=True)


def _end_after_ray() -> None:
    """On a thread: if a Ray that runs here ends and this process does not, end all its children and itself."""
    children = _children()
    servers = [each for each in children if _name_of(each) == RAY_SERVER]
    while servers:
        if any(map(_listens, servers)):
            time.sleep(0.1)
            continue
        time.sleep(RAY_GONE_S)
        if not any(map(_listens, servers)):  # it may have been starting
            _end_at_once(children, 0)


def _name_of(process: "psutil.Process") -> str:
    with suppress(Exception):  # it has ended
        return process.name()
    return ""


def _listens(process: "psutil.Process") -> bool:
    """One that gets a signal stops listening, and ends only some time later."""
    with suppress(Exception):  # it has ended
        return any(each.status == "LISTEN" for each in process.net_connections())
    return False


def _end_at_once(children: "list[psutil.Process]", status: int) -> None:
    """Kill them and exit."""
    for child in children:
        with suppress(Exception):  # it has ended
            child.kill()
    with suppress(OSError):
        os.write(2, b"closed\n")
    os._exit(status)


@contextmanager
def _ends_with_ray() -> Iterator[None]:
    """If a Ray that runs here loses a process that it needs, all children and this process end, with status 1."""
    children = _children()
    needed = {each.pid: name for each in children if (name := _name_of(each)) in RAY_PROCESSES}
    closing = threading.Event()
    if needed:
        threading.Thread(target=_end_with_first, args=(needed, children, closing), daemon=True).start()
    try:
        yield
    finally:
        closing.set()


def _end_with_first(needed: dict[int, str], children: "list[psutil.Process]", closing: threading.Event) -> None:
    """On a thread: end all once one of `needed`, names by pid, has ended, unless this process is `closing` then."""
    pid = _first_ended(needed)
    if not closing.wait(RAY_GONE_S):
        logger.error("%s (pid %d) has ended, and with it this Ray; the cluster ends", needed[pid], pid)
        _end_at_once([*children, *_children()], 1)


def _first_ended(pids: Iterable[int]) -> int:
    with ExitStack() as stack:
        poll, opened = select.poll(), {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return pid
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)  # readable once it has ended
            opened[descriptor] = pid
        return opened[poll.poll()[0][0]]


@asynccontextmanager
async def running_cluster(
    spec: "ClusterSpec", runtime: str, progress: Callable[[str], None], *, gateways: bool = True, grace_s: float = 0.0
) -> AsyncIterator["Serving"]:
    """A running cluster, with its gateways unless `gateways` is false. It is always closed at the end.

    Running requests then get `grace_s` to finish, unless there is a second signal.
    """
    from cluster.frontend.servers import open_servers
    from cluster.serving import serve

    serving = await serve(spec, runtime=runtime, make_server=open_servers, progress=progress, gateways=gateways)
    interrupts = Interrupts(serves=True)
    try:
        with _ends_with_ray():
            yield serving
    finally:
        progress(closing_line(grace_s))
        await interrupts.run_close(serving.close(grace_s), serving.cancel_requests)


def closing_line(grace_s: float) -> str:
    return f"closing: running requests may end within {grace_s:g} s; Ctrl-C cuts them" if grace_s else "closing"


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Ctrl-C and SIGTERM cancel it, so its `finally` blocks run, and raise KeyboardInterrupt."""

    async def guarded() -> T:
        Interrupts()
        return await work

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        result = asyncio.run(guarded())
    except asyncio.CancelledError:
        for number in SIGNALS:  # the handlers that the interpreter restores at exit would print a traceback
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt from None
    for number, handler in before.items():
        signal.signal(number, handler)
    return result
