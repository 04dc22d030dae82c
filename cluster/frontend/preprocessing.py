"""Parses and tokenizes large inputs in separate processes: both hold the GIL (a second for a megabyte), and the other
requests' tokens must not wait for that.

    server ── function, arguments ──> a lane: one at a time, smallest first ──> its process ── result ──> server

Knows processes and their limits; the work itself is a function of the tokenizer that the caller passes.
"""

import asyncio
import contextlib
import heapq
import logging
import os
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

from cluster.events import Rejected
from cluster.frontend.text import Tokenizer
from workers.errors import InvalidRequest

logger = logging.getLogger(__name__)

LARGE_BYTES = 4096  # of input: 5 ms of tokenizing at most, measured; what is larger is not done in the loop
HUGE_BYTES = 256 << 10  # has a lane of its own, so that others wait for a fraction of a second at most
PREPROCESS_S = 30.0  # for one piece of work
PREPROCESS_WAIT_S = 60.0  # for its turn and its end
PREPROCESS_START_S = 60.0  # until a process has its tokenizer
MOST_WAITING = 256  # pieces of work in a lane
MOST_WAITING_BYTES = 64 << 20
RETRY_AFTER_S = 1.0
MOST_ANSWER_BYTES = 1 << 30  # never reached: a pipe that is not read to its end keeps its process from being waited for
END_S = 5.0
MODULE = "cluster.frontend.preprocessing_process"
HEADER = struct.Struct("!Q")

CLOSING = Rejected("this gateway is closing; try another one", RETRY_AFTER_S)

T = TypeVar("T")
Load = Callable[[], Tokenizer]


class Preprocessing(Protocol):
    """Where functions of a tokenizer run, beside the event loop."""

    async def call(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """`function(tokenizer, *args)`, a module's, on `size` bytes of input. Raises what it raises, and `Rejected`."""
        ...

    async def aclose(self) -> None: ...


class Here:
    """In this process: for gateways without servers, whose callers are trusted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def call(self, size: int, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, self._tokenizer, *args)

    async def aclose(self) -> None:
        """Nothing to end."""


class Processes:
    """In processes that load their tokenizer with `load`, which pickles by name. Owned by a gateway; to be closed.

    A process starts with the first work for it (or with `start`), and again when it died. Work that takes longer than
    `limit_s` is `InvalidRequest`, what died with its process or finds its lane full is `Rejected`.
    """

    def __init__(self, load: Load, *, limit_s: float = PREPROCESS_S, most_waiting: int = MOST_WAITING) -> None:
        self._lanes = [_Lane(load, limit_s, most_waiting) for _ in range(2)]

    def start(self) -> None:
        """Have the process for ordinary prompts ready before the first of them."""
        self._lanes[0].start()

    async def call(self, size: int, function: Callable[..., T], *args: Any) -> T:
        result: T = await self._lanes[size > HUGE_BYTES].call(size, pickle.dumps((function, args)))
        return result

    async def aclose(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self._lanes))


@dataclass(order=True, slots=True)
class _Work:
    """The smallest goes first, then the oldest."""

    size: int
    number: int
    frame: bytes = field(compare=False)
    done: "asyncio.Future[Any]" = field(compare=False)


class _Lane:
    """One process at most, and the work that waits for it. Owned by `Processes`."""

    def __init__(self, load: Load, limit_s: float, most_waiting: int) -> None:
        self._load = load
        self._limit_s = limit_s
        self._most_waiting = most_waiting
        self._waiting: list[_Work] = []  # a heap
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
            len(self._waiting) >= self._most_waiting or waiting_bytes + len(frame) > MOST_WAITING_BYTES
        ):
            raise Rejected("too many large prompts wait in this gateway; try again", RETRY_AFTER_S, "gateway-full")
        work = _Work(size, next(self._numbers), frame, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, work)
        self._wake.set()
        self.start()
        try:
            async with asyncio.timeout(PREPROCESS_WAIT_S):
                return await work.done
        except TimeoutError:
            raise Rejected("this gateway has too many prompts to tokenize; try again", RETRY_AFTER_S) from None
        finally:
            if work in self._waiting:  # the caller has left
                self._waiting.remove(work)
                heapq.heapify(self._waiting)

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])
        for work in self._waiting:
            _settle(work.done, False, CLOSING)

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._ready()
                except Exception as error:  # callers get this error too
                    logger.warning("the process that tokenizes did not start: %s", error)
                while not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                await self._one(heapq.heappop(self._waiting))
        finally:
            await self._end()

    async def _one(self, work: _Work) -> None:
        try:
            good, result = await self._answered(work)
        except TimeoutError:
            await self._end()
            rule = f"this gateway gives each prompt at most {self._limit_s:g} s"
            good, result = False, InvalidRequest("prompt", f"takes too long to tokenize; {rule}: shorten it")
        except (OSError, EOFError) as error:
            await self._end()
            logger.warning("the process that tokenizes ended over an input of %d bytes: %s", work.size, error)
            good, result = False, Rejected("the process that tokenizes ended; try again", RETRY_AFTER_S)
        except asyncio.CancelledError:
            _settle(work.done, False, CLOSING)
            raise
        except Exception as error:
            await self._end()
            good, result = False, error
        _settle(work.done, good, result)

    async def _answered(self, work: _Work) -> tuple[bool, Any]:
        """By the process there is; where that is found dead, by a new one."""
        if self._process is not None:
            try:
                return await self._asked(work)
            except (OSError, EOFError):
                await self._end()
        await self._ready()
        return await self._asked(work)

    async def _asked(self, work: _Work) -> tuple[bool, Any]:
        async with asyncio.timeout(self._limit_s):
            answer: tuple[bool, Any] = pickle.loads(await self._exchange(work.frame))
            return answer

    async def _ready(self) -> None:
        """There is a process that has its tokenizer."""
        if self._process is not None and self._process.returncode is None:
            return
        await self._end()
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=pipe,
            stdout=pipe,
            limit=MOST_ANSWER_BYTES,
            env=_environment(),
            process_group=0,  # Ctrl-C is the server's, also before this process can ignore it
        )
        try:
            async with asyncio.timeout(PREPROCESS_START_S):
                await self._exchange(pickle.dumps((self._load, self._limit_s)))
        except TimeoutError:
            raise OSError(f"it had no tokenizer after {PREPROCESS_START_S:.0f} s") from None
        except BaseException:
            await self._end()
            raise

    async def _exchange(self, work: bytes) -> bytes:
        """Send one frame, and read one. Raises OSError or EOFError when the process is gone."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(HEADER.pack(len(work)))
        self._process.stdin.write(work)
        await self._process.stdin.drain()
        (length,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
        return await self._process.stdout.readexactly(length)

    async def _end(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()


def _settle(done: "asyncio.Future[Any]", good: bool, result: Any) -> None:
    if done.done():  # the caller has left
        return
    if good:
        done.set_result(result)
    else:
        done.set_exception(result)


def _environment() -> dict[str, str]:
    """It finds what this process found, and computes on one core."""
    paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
    return {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
