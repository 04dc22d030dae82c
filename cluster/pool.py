"""Keeping one replica of a pool alive: start it, introduce it to its peers, listen to it, replace it when it fails.

    start ──ready──> introduce ──> READY ──silent, gone or unfit──> DEAD ──restart──> start ...

One `Keeper` for each replica, one task for each keeper. Knows one worker; the controller knows all.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from cluster.runtime.interface import Runtime, RuntimeUnavailable, WorkerGone, WorkerHandle, WorkerOrder
from cluster.spec import PoolSpec
from cluster.view import WorkerState, WorkerView
from kvtransfer.errors import TransferError, TransportUnavailable
from workers.errors import ModelError, WorkerError
from workers.stats import WorkerInfo

logger = logging.getLogger(__name__)

START_AGAIN_S = 5.0
RETRY_S = 0.2  # between calls to a process that is coming up


class Keeper:
    """Owned by the Controller. `changed` is called after every change of `view`."""

    def __init__(
        self,
        pool: PoolSpec,
        order: WorkerOrder,
        runtime: Runtime,
        start_timeout_s: float,
        introduce: Callable[["Keeper"], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self.pool = pool
        self.order = order
        self.handle: WorkerHandle | None = None
        self.info: WorkerInfo | None = None
        self.view = WorkerView(order.config.name, pool.name, pool.role, WorkerState.STARTING, parallel=pool.parallel)
        self.introduced = False  # its peers know this incarnation
        self.fatal: Exception | None = None  # the specification's fault: trying again cannot help
        self._runtime = runtime
        self._start_timeout_s = start_timeout_s
        self._introduce = introduce
        self._changed = changed
        self._keeping: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.order.config.name

    def begin(self) -> None:
        self._keeping = asyncio.ensure_future(self._keep())

    async def end(self, grace_s: float) -> None:
        """Stop keeping, and stop the worker."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self.handle is not None:
            await self._runtime.stop_worker(self.handle, grace_s)

    async def _keep(self) -> None:
        while self.fatal is None:
            try:
                await self._run_once()
            except (ModelError, RuntimeUnavailable, TransportUnavailable) as error:
                logger.error("worker %s cannot run: %s", self.name, error)
                if self.view.incarnation:  # it ran before: a disk or a hub that is away for a while
                    self._show(WorkerState.DEAD, detail=str(error), restarts=self.view.restarts + 1)
                    await asyncio.sleep(START_AGAIN_S)
                else:
                    self.fatal = error
                    self._show(WorkerState.DEAD, detail=str(error))
            except (WorkerGone, WorkerError, TransferError, TimeoutError) as error:
                reason = str(error) or "it was silent"
                logger.warning("worker %s is replaced: %s", self.name, reason)
                refused = self.view.state is WorkerState.STARTING and isinstance(error, WorkerError)
                self.introduced = False
                self._show(WorkerState.DEAD, detail=reason, restarts=self.view.restarts + 1)
                if refused:  # it lives, and could only say so again
                    await asyncio.sleep(START_AGAIN_S)
            except Exception as error:
                self.fatal = error
                self._show(WorkerState.DEAD, detail=f"{type(error).__name__}: {error}")
                raise

    async def _run_once(self) -> None:
        """From start to death; always ends with an error."""
        if self.handle is None:
            self.handle = await self._runtime.start_worker(self.order)
        elif self.view.state is WorkerState.DEAD:
            self.handle = await self._runtime.restart_worker(self.order, self.handle, self.view.incarnation)
        self.introduced = False
        self._show(WorkerState.STARTING)
        self.info = await self._started(self.handle)
        await self._introduce(self)
        self._show(
            WorkerState.READY,
            incarnation=self.info.incarnation,
            node=self.info.node,
            pid=self.info.pid,
            capacity_tokens=self.info.capacity_tokens,
            memory_bytes=self.info.memory_bytes,
            kv_token_bytes=sum(each.layout.block_bytes // each.layout.block_size for each in self.info.peer.shards),
            detail="",
        )
        await self._listen(self.handle)

    async def _started(self, handle: WorkerHandle) -> WorkerInfo:
        """A process that is being restarted refuses calls for a while: ask again until the bound."""
        async with asyncio.timeout(self._start_timeout_s):
            while True:
                try:
                    return await handle.start()
                except WorkerGone as error:
                    logger.debug("worker %s is not up yet: %s", self.name, error)
                    await asyncio.sleep(RETRY_S)

    async def _listen(self, handle: WorkerHandle) -> None:
        received = 0
        while True:
            async with asyncio.timeout(self.order.dead_after_s):
                bundle = await handle.poll("controller", received)
            if bundle.incarnation != self.view.incarnation:
                raise WorkerGone("it restarted")
            received = bundle.number
            self.view = replace(self.view, stats=bundle.stats)  # statistics alone are no change of membership

    def _show(self, state: WorkerState, **facts: str | int) -> None:
        self.view = replace(self.view, state=state, **facts)
        self._changed()
