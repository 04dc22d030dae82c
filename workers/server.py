"""Loads one worker for a runtime, and gives access to it once it has loaded. Knows no request."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from workers.config import WorkerConfig
from workers.engine.executor import Executor
from workers.errors import WorkerClosed
from workers.worker import Worker

ExecutorFactory = Callable[[WorkerConfig, str], Awaitable[Executor]]  # (config, incarnation)


class WorkerServer:
    """Owned by its process (a Ray actor) or its test. Every method runs on one event loop."""

    def __init__(self, config: WorkerConfig, open_executor: ExecutorFactory, *, heartbeat_s: float = 0.25) -> None:
        self.config = config
        self.incarnation = uuid.uuid4().hex
        self._open_executor = open_executor
        self._heartbeat_s = heartbeat_s
        self._opening: asyncio.Task[Worker] | None = None
        self._closed = False

    async def open(self) -> Worker:
        """Load the model and start the worker; repeated calls return the same one, or try again after a failure.

        Errors: `ModelError`, `TransportUnavailable`, `RankLost`, `WorkerClosed`.
        """
        if self._closed:
            raise WorkerClosed(f"worker {self.config.name} is closing")
        if self._opening is None or (self._opening.done() and not self.is_open):
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Worker:
        executor = await self._open_executor(self.config, self.incarnation)
        return await Worker.open(self.config, self.incarnation, executor, heartbeat_s=self._heartbeat_s)

    @property
    def is_open(self) -> bool:
        """Whether the worker has loaded."""
        opening = self._opening
        return opening is not None and opening.done() and not opening.cancelled() and opening.exception() is None

    def worker(self, incarnation: str = "") -> Worker:
        """The worker. Raises `WorkerClosed` while it loads, or if the caller expects another incarnation ("": any)."""
        if incarnation not in ("", self.incarnation):
            raise WorkerClosed(f"worker {self.config.name} restarted: {incarnation} is gone")
        if self._opening is None or not self.is_open:
            raise WorkerClosed(f"worker {self.config.name} is {'closing' if self._closed else 'still loading'}")
        return self._opening.result()

    async def close(self) -> None:
        """Close the worker; one that is still loading is closed as soon as it has loaded."""
        self._closed = True
        if self._opening is None:
            return
        await asyncio.wait([self._opening])
        if self.is_open:
            await self._opening.result().close()
