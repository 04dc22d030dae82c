"""A worker that lies some way off: calls take their time there and back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from cluster.runtime.interface import WorkerHandle
from workers.worker import Worker

Verb = Callable[..., Awaitable[Any]]


class Distant:
    """A `WorkerHandle` whose calls take `call_s`, half of it each way. An error takes its time as an answer does."""

    def __init__(self, worker: Worker, call_s: float) -> None:
        self.worker = worker
        self.config = worker.config
        self._half_s = call_s / 2

    def at(self, incarnation: str) -> WorkerHandle:
        self.worker.require(incarnation)
        return cast(WorkerHandle, self)

    def __getattr__(self, name: str) -> Verb:
        verb: Verb = getattr(self.worker, name)

        async def call(*args: Any) -> Any:
            await asyncio.sleep(self._half_s)
            try:
                return await verb(*args)
            finally:
                await asyncio.sleep(self._half_s)

        return call
