"""A worker that lies some way off: calls take their time there and back, and what is told of its state may be old."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from cluster.runtime.interface import WorkerHandle
from workers.request import Bundle
from workers.stats import WorkerStats

Verb = Callable[..., Awaitable[Any]]


class Distant:
    """A `WorkerHandle` whose calls take `call_s`, half of it each way. An error takes its time as an answer does.

    Bundles carry the last statistics that any bundle was given at least `stale_s` ago; outputs come in time.
    """

    def __init__(self, worker: WorkerHandle, call_s: float, stale_s: float = 0.0) -> None:
        self.worker = worker
        self._half_s = call_s / 2
        self._stale_s = stale_s
        self._told: deque[tuple[float, WorkerStats]] = deque()

    def at(self, incarnation: str) -> WorkerHandle:
        self.worker.at(incarnation)  # raises if that one is gone
        return cast(WorkerHandle, self)

    async def poll(self, *args: Any) -> Bundle:
        bundle: Bundle = await self._call("poll", *args)
        return msgspec.structs.replace(bundle, stats=self._aged(bundle.stats)) if self._stale_s else bundle

    def __getattr__(self, name: str) -> Verb:
        async def call(*args: Any) -> Any:
            return await self._call(name, *args)

        return call

    async def _call(self, name: str, *args: Any) -> Any:
        verb: Verb = getattr(self.worker, name)
        await asyncio.sleep(self._half_s)
        try:
            return await verb(*args)
        finally:
            await asyncio.sleep(self._half_s)

    def _aged(self, stats: WorkerStats) -> WorkerStats:
        """The first is told at once: nothing older is known. Kept are those of the last `stale_s` and one before."""
        told, now_s = self._told, asyncio.get_running_loop().time()
        told.append((now_s, stats))
        while len(told) > 1 and told[1][0] <= now_s - self._stale_s:
            told.popleft()
        return told[0][1]
