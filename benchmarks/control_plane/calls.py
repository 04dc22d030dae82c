"""Calls between the measured processes: pickled frames on one loopback connection for each pair of processes.

Stands in for Ray's actor calls, so that a process's CPU time is the control plane's. Only for processes of one user.
"""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

from cluster.runtime.runtime_errors import WorkerGone

HOST = "127.0.0.1"
_BYTES = 4


async def listen(target: Callable[[], object]) -> int:
    """Serve the async methods of `target()` until the process ends; returns the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: set[asyncio.Task[None]] = set()

        async def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
            try:
                result: tuple[bool, Any] = True, await getattr(target(), method)(*args)
            except Exception as error:
                result = False, error
            _write(writer, (number, *result))

        try:
            while True:
                task = asyncio.ensure_future(answer(*await _read(reader)))
                running.add(task)
                task.add_done_callback(running.discard)
        except (EOFError, OSError):
            for task in tuple(running):
                task.cancel()
            writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


class RemoteService:
    """A `ServiceHandle` of the target behind a port. The first call connects; `close` it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        """What the method returns or raises; `WorkerGone` if the process has ended or does not answer in time."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        writer = await asyncio.shield(self._opening)
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            _write(writer, (number, method, args))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise WorkerGone(f"no answer to {method} within {timeout_s:g} s") from None
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._opening is not None:
            (await self._opening).close()

    async def _open(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(HOST, self._port)
        self._reading = asyncio.ensure_future(self._take_answers(reader))
        return writer

    async def _take_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, is_result, value = await _read(reader)
                if (answer := self._waiting.get(number)) is None or answer.done():
                    continue
                if is_result:
                    answer.set_result(value)
                else:
                    answer.set_exception(value)
        except (EOFError, OSError):
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(WorkerGone("its process ended"))


def _write(writer: asyncio.StreamWriter, message: object) -> None:
    frame = pickle.dumps(message)
    writer.write(len(frame).to_bytes(_BYTES, "big") + frame)


async def _read(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(_BYTES), "big")
    return pickle.loads(await reader.readexactly(size))
