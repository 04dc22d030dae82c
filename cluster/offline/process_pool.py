"""Processes that simulate. They end with this process, however it ends, and leave nothing: each has a pipe of its own
and ends when the other end closes. (The standard library's pool leaves named semaphores if everything is killed, and
orphans if its parent is.) Knows nothing about what is computed.
"""

import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

CONTEXT = get_context("spawn")


class ProcessPool(ThreadPoolExecutor):
    """An executor of `count` processes, each driven by a thread. Functions and results are pickled.

    `kill` ends the processes at once; calls then raise `BrokenExecutor`. Leaving the `with` block kills, too.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count, "process", self._start)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._processes: list[SpawnProcess] = []
        self._is_killed = False

    def submit(self, work: Callable[..., Any], /, *arguments: Any) -> Any:  # type: ignore[override]
        return super().submit(self._call, work, arguments)

    def kill(self) -> None:
        with self._lock:
            self._is_killed = True
            for process in self._processes:
                process.kill()

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()
            process.close()

    def _start(self) -> None:
        """Start the process of this thread. It never sees Ctrl-C, not even while it imports."""
        resource_tracker.ensure_running()  # which would unblock the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of this thread; processes inherit it
        ours, theirs = CONTEXT.Pipe()
        self._local.calls = ours
        with self._lock, theirs:
            if not self._is_killed:
                process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                self._processes.append(process)

    def _call(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            self._local.calls.send((work, arguments))
            result, error = self._local.calls.recv()
        except (EOFError, OSError):
            raise BrokenExecutor("a process that simulates has ended") from None
        if error is not None:
            raise error
        return result


def _serve(calls: Connection) -> None:
    """The process: call what arrives.

    Requests fail in the overloads that a search looks for, so warnings are off.
    """
    logging.disable(logging.WARNING)
    arrived: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(calls, arrived), daemon=True).start()
    while True:
        calls.send(_result(arrived.get()))


def _read(calls: Connection, arrived: "SimpleQueue[bytes]") -> None:
    """On a thread, so that the end of the parent ends a call in progress."""
    try:
        while True:
            arrived.put(calls.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _result(call: bytes) -> tuple[Any, Exception | None]:
    try:
        work, arguments = pickle.loads(call)
        return work(*arguments), None
    except Exception as error:  # the parent raises it
        error.add_note(traceback.format_exc())
        return None, error
