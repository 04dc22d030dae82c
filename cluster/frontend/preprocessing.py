"""Parses and tokenizes large inputs in child processes: both hold the GIL, for about a second per megabyte, which would
delay the tokens of other requests. Others compile grammars to check them: that may take any time, and crash, so each is
compiled in a process of its own, which is forked from one that has loaded the tokenizer.

    server ── function, arguments ──> queue: one call at a time, smallest first ──> child process ── result ──> server

Knows processes and their limits. The caller passes a function of the tokenizer.
"""

import asyncio
import contextlib
import heapq
import logging
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from cluster.events import Rejected
from cluster.frontend.one_of import with_any_of_in
from cluster.frontend.text import Tokenizer
from workers.errors import InvalidRequest
from workers.request import Grammar

logger = logging.getLogger(__name__)

LARGE_BYTES = 4096  # larger inputs are not tokenized in the event loop; this one takes 5 ms at most, measured
HUGE_BYTES = 256 << 10  # larger inputs have a process of their own, so that others wait for less than a second
PREPROCESS_S = 30.0  # limit of one call
GRAMMAR_CPU_S = 0.2  # of computation; the slowest of 412 real schemas takes 0.055 s
GRAMMAR_S = 5.0  # for that computation: a host whose cores are all busy leaves a thirtieth of one, or less
GRAMMAR_NICENESS = 15  # beside a worker's thread it gets a thirtieth of a core
GRAMMAR_STACK_BYTES = 1 << 20  # workers have more: what fits here does not overflow theirs
PREPROCESS_WAIT_S = 60.0  # limit of a call and its wait
PREPROCESS_START_S = 60.0  # until a process has loaded its tokenizer
MAX_WAITING = 256  # calls in a queue
MAX_WAITING_BYTES = 64 << 20
RETRY_AFTER_S = 1.0
MAX_REPLY_BYTES = 1 << 30  # never reached: asyncio cannot wait for a process whose pipe was not read to the end
END_S = 5.0
MODULE = "cluster.frontend.preprocessing_process"
HEADER = struct.Struct("!Q")

DIED = Rejected("the tokenizer process died; try again", RETRY_AFTER_S)
GRAMMAR_CRASHED = InvalidRequest("sampling.grammar", "cannot be compiled: it is too deep or too large; simplify it")
GRAMMAR_TOO_LONG = InvalidRequest("sampling.grammar", f"takes more than {GRAMMAR_CPU_S:g} s to compile; simplify it")
HOST_BUSY = Rejected("this gateway's host is too busy to compile the grammar; try again", RETRY_AFTER_S)
CLOSING = Rejected("this gateway is closing; try another one", RETRY_AFTER_S)

T = TypeVar("T")
Load = Callable[[], Tokenizer]


class Preprocessing(Protocol):
    """Runs functions of a tokenizer outside the event loop."""

    async def call(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """`function(tokenizer, *args)` on `size` bytes of input. `function`: of a module. Raises its errors, and
        `Rejected`.
        """
        ...

    async def check_grammar(self, grammar: Grammar) -> Grammar:
        """As `Tokenizer.check_grammar`. Raises `Rejected` too."""
        ...

    async def aclose(self) -> None: ...


class PreprocessingPool:
    """Child processes: for large inputs, for huge ones and for grammars. Owned by a gateway, which closes it.

    `load` returns the tokenizer and must pickle. A process starts with its first call (or with `start`), and again
    after it died. A call that takes longer than `limit_s` raises `InvalidRequest`; one whose process died, or whose
    queue is full, raises `Rejected`.
    """

    def __init__(self, load: Load, *, limit_s: float = PREPROCESS_S, max_waiting: int = MAX_WAITING) -> None:
        self._processes = [_QueuedProcess("large inputs", load, limit_s, max_waiting) for _ in range(2)]
        load_with_grammars = partial(_load_with_grammars, load, GRAMMAR_NICENESS)
        self._grammars = _QueuedProcess("new grammars", load_with_grammars, limit_s, max_waiting)

    def start(self) -> None:
        """Start the process for large inputs before its first call."""
        self._processes[0].start()

    async def call(self, size: int, function: Callable[..., T], *args: Any) -> T:
        result: T = await self._processes[size > HUGE_BYTES].call(size, pickle.dumps((function, args)))
        return result

    async def check_grammar(self, grammar: Grammar) -> Grammar:
        call = pickle.dumps((_check_grammar, (grammar, GRAMMAR_S)))
        result: Grammar = await self._grammars.call(len(grammar.text), call)
        return result

    async def aclose(self) -> None:
        await asyncio.gather(*(process.close() for process in (*self._processes, self._grammars)))


@dataclass(order=True, slots=True)
class _Call:
    """Sorts by size, then by age."""

    size: int
    number: int
    frame: bytes = field(compare=False)
    result: "asyncio.Future[Any]" = field(compare=False)


class _QueuedProcess:
    """At most one child process, and the calls that wait for it. `inputs`: their name in errors. Owned by
    `PreprocessingPool`.
    """

    def __init__(self, inputs: str, load: Load, limit_s: float, max_waiting: int) -> None:
        self._inputs = inputs
        self._load = load
        self._limit_s = limit_s
        self._max_waiting = max_waiting
        self._waiting: list[_Call] = []  # a heap
        self._numbers = count()
        self._wake = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    def start(self) -> None:
        if self._working is None:
            self._working = asyncio.create_task(self._run())

    async def call(self, size: int, frame: bytes) -> Any:
        waiting_bytes = sum(len(each.frame) for each in self._waiting)
        if self._waiting and (
            len(self._waiting) >= self._max_waiting or waiting_bytes + len(frame) > MAX_WAITING_BYTES
        ):
            raise Rejected(f"too many {self._inputs} wait in this gateway; try again", RETRY_AFTER_S, "gateway-full")
        call = _Call(size, next(self._numbers), frame, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, call)
        self._wake.set()
        self.start()
        try:
            async with asyncio.timeout(PREPROCESS_WAIT_S):
                return await call.result
        except TimeoutError:
            rule = f"in {PREPROCESS_WAIT_S:g} s this gateway did not come to this one of too many {self._inputs}"
            raise Rejected(f"{rule}; try again, or on another gateway", RETRY_AFTER_S) from None
        finally:
            if call in self._waiting:  # the caller was cancelled, or its time is up
                self._waiting.remove(call)
                heapq.heapify(self._waiting)

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])
        for call in self._waiting:
            _settle(call.result, False, CLOSING)

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._ensure_process()
                except Exception as error:  # callers get this error too
                    logger.warning("the tokenizer process did not start: %s", error)
                while not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                await self._execute(heapq.heappop(self._waiting))
        finally:
            await self._kill()

    async def _execute(self, call: _Call) -> None:
        try:
            ok, result = await self._try(call)
        except TimeoutError:
            await self._kill()
            rule = f"this gateway gives each prompt at most {self._limit_s:g} s"
            ok, result = False, InvalidRequest("prompt", f"takes too long to tokenize; {rule}: shorten it")
        except (OSError, EOFError) as error:
            await self._kill()
            logger.warning("the tokenizer process died on an input of %d bytes: %s", call.size, error)
            ok, result = False, DIED
        except asyncio.CancelledError:
            _settle(call.result, False, CLOSING)
            raise
        except Exception as error:
            await self._kill()
            ok, result = False, error
        _settle(call.result, ok, result)

    async def _try(self, call: _Call) -> tuple[bool, Any]:
        """In the current process; if that turns out to be dead, in a new one."""
        if self._process is not None:
            try:
                return await self._send(call)
            except TimeoutError:  # an OSError too, but no sign of a dead process
                raise
            except (OSError, EOFError):
                await self._kill()
        await self._ensure_process()
        return await self._send(call)

    async def _send(self, call: _Call) -> tuple[bool, Any]:
        async with asyncio.timeout(self._limit_s):
            result: tuple[bool, Any] = pickle.loads(await self._exchange(call.frame))
            return result

    async def _ensure_process(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None and self._process.returncode is None:
            return
        await self._kill()
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            stdin=pipe,
            stdout=pipe,
            limit=MAX_REPLY_BYTES,
            env=_environment(),
            start_new_session=True,  # only the server gets Ctrl-C
        )
        try:
            async with asyncio.timeout(PREPROCESS_START_S):
                await self._exchange(pickle.dumps((self._load, self._limit_s)))
        except TimeoutError:
            raise OSError(f"the tokenizer was not loaded after {PREPROCESS_START_S:.0f} s") from None
        except BaseException:
            await self._kill()
            raise

    async def _exchange(self, frame: bytes) -> bytes:
        """Send one frame and read one. Raises OSError or EOFError if the process is gone."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(HEADER.pack(len(frame)))
        self._process.stdin.write(frame)
        await self._process.stdin.drain()
        (length,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
        return await self._process.stdout.readexactly(length)

    async def _kill(self) -> None:
        """Kill the process, if there is one, and wait until it has exited."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()


def _load_with_grammars(load: Load, niceness: int) -> Tokenizer:
    tokenizer = load()
    tokenizer.load_grammars()
    _lower_priority(niceness)
    return tokenizer


def _lower_priority(niceness: int) -> None:
    """Of this process, which has a session of its own, and its forks.

    Linux shares cores among sessions first (autogroup); a niceness counts only within one. Processes in a CPU control
    group, as a container has, are not divided by session.
    """
    os.nice(niceness)
    with contextlib.suppress(OSError):  # no Linux, or without autogroup
        for _ in range(10):
            with contextlib.suppress(BlockingIOError):  # users may change one session every 100 ms
                Path("/proc/self/autogroup").write_text(str(niceness))
                return
            time.sleep(0.1)


def _check_grammar(tokenizer: Tokenizer, grammar: Grammar, limit_s: float) -> Grammar:
    """In a process of its own, which may crash. Raises `InvalidRequest`, and `Rejected` after `limit_s`."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        _end_with_check(tokenizer, grammar, limit_s, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as results:
        found = results.read()
    _, status = os.waitpid(child, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise {-signal.SIGPROF: GRAMMAR_TOO_LONG, -signal.SIGALRM: HOST_BUSY}.get(code, GRAMMAR_CRASHED)
    checked: Grammar | InvalidRequest = pickle.loads(found)
    if isinstance(checked, InvalidRequest):
        raise checked
    return checked


def _end_with_check(tokenizer: Tokenizer, grammar: Grammar, limit_s: float, writer: int) -> NoReturn:
    """Write the result, in a thread with a small stack, and end the process."""
    signal.setitimer(signal.ITIMER_PROF, GRAMMAR_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    threading.stack_size(GRAMMAR_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            result: Grammar | InvalidRequest = thread.submit(tokenizer.check_grammar, with_any_of_in(grammar)).result()
    except InvalidRequest as error:
        result = error
    except BaseException:
        os._exit(1)
    with os.fdopen(writer, "wb") as results:
        pickle.dump(result, results)
    os._exit(0)


def _settle(future: "asyncio.Future[Any]", ok: bool, result: Any) -> None:
    if future.done():  # the caller was cancelled
        return
    if ok:
        future.set_result(result)
    else:
        future.set_exception(result)


def _environment() -> dict[str, str]:
    """The child imports from the same paths, and computes on one core."""
    paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
    return {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
