"""Clusters that live as long as a command: up, and surely down again, also on Ctrl-C and SIGTERM.

The first signal cancels the command's work; its `finally`s run, and requests may end for a while. The second one cuts
these, or, where there are none yet, ends the processes of this one at once. Later ones are ignored.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what stands behind these is heavy
    from cluster.serving import Serving
    from cluster.spec import ClusterSpec


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """The signals of one task: the first one cancels it, the second one cuts what `closed` waits for.

    Python's own handlers rather than the loop's: they hold until the process is gone, so no late signal breaks into the
    end of Ray or of the interpreter. A newer one takes the signals over.
    """

    def __init__(self, *, serves: bool = False) -> None:
        """Listens for the running task. `serves`: it ends by `closed`; else there is nothing to cut."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cut = asyncio.Event()
        self._serves = serves
        self._heard = 0
        for number in SIGNALS:
            signal.signal(number, self._hear)

    async def closed(self, close: Coroutine[Any, Any, None], cut: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `close` to its end; a second signal runs `cut` beside it."""
        closing, cutting = asyncio.ensure_future(close), asyncio.ensure_future(self._cut.wait())
        await asyncio.wait([closing, cutting], return_when=asyncio.FIRST_COMPLETED)
        if cutting.cancel():
            await closing
        else:
            await asyncio.gather(closing, cut())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard += 1
        if self._loop.is_closed() or self._heard > 2:
            return
        if self._heard == 1:
            self._loop.call_soon_threadsafe(self._task.cancel)
        elif self._serves:
            self._loop.call_soon_threadsafe(self._cut.set)
        else:
            _end_at_once()


def _end_at_once() -> None:
    """Kill what this process started, and go: Ray's start, for one, cannot be broken off in any other way."""
    with suppress(ImportError):  # without it there is no Ray either
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    with suppress(OSError):
        os.write(2, b"closed\n")
    os._exit(128 + signal.SIGINT)


@asynccontextmanager
async def running_cluster(
    spec: "ClusterSpec", runtime: str, progress: Callable[[str], None], *, gateways: bool = True, grace_s: float = 0.0
) -> AsyncIterator["Serving"]:
    """A cluster with its doors open, if it has `gateways`; closed at the end, whatever the end is.

    What runs then may go on for `grace_s`, unless there is a second signal.
    """
    from cluster.frontend.servers import open_servers
    from cluster.serving import serve

    serving = await serve(spec, runtime=runtime, make_server=open_servers, progress=progress, gateways=gateways)
    interrupts = Interrupts(serves=True)
    try:
        yield serving
    finally:
        progress(closing_words(grace_s))
        await interrupts.closed(serving.close(grace_s), serving.cut)


def closing_words(grace_s: float) -> str:
    return f"closing: running requests may end within {grace_s:g} s; Ctrl-C cuts them" if grace_s else "closing"


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end. Ctrl-C and SIGTERM cancel the work, and its `finally`s run. Raises KeyboardInterrupt then."""

    async def guarded() -> None:
        Interrupts()
        await work

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        for number in SIGNALS:  # the interpreter puts back others than this one before it is gone
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt from None
    for number, handler in before.items():
        signal.signal(number, handler)
