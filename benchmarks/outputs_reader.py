"""Reads a worker's outputs, message by message, without a gateway."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from workers.request import EngineOutputs


class _Subscribes(Protocol):
    def subscribe(
        self, subscriber: str, on_outputs: Callable[[EngineOutputs], object], /
    ) -> Coroutine[Any, Any, None]: ...


class OutputsReader:
    """A subscription to one worker. `close` it: then the worker ends the subscriber's requests."""

    def __init__(self, worker: _Subscribes, subscriber: str) -> None:
        self._outputs: asyncio.Queue[EngineOutputs] = asyncio.Queue()
        self._subscribing = asyncio.ensure_future(worker.subscribe(subscriber, self._outputs.put_nowait))

    @classmethod
    async def open(cls, worker: _Subscribes, subscriber: str) -> "OutputsReader":
        """Returns once the worker knows the subscriber: requests may follow. Drops the first, empty message."""
        reader = cls(worker, subscriber)
        await reader.next()
        return reader

    async def next(self) -> EngineOutputs:
        """The next message: outputs, or a heartbeat. Raises what ended the subscription."""
        reading = asyncio.ensure_future(self._outputs.get())
        await asyncio.wait({reading, self._subscribing}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            self._subscribing.result()
        return await reading

    async def close(self) -> None:
        self._subscribing.cancel()
        await asyncio.gather(self._subscribing, return_exceptions=True)
