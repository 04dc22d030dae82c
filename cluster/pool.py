"""Keeping one replica of a pool alive: start it, introduce it to its peers, listen to it, replace it when it fails.

    start ──ready──> introduce ──> READY ──silent, gone or unfit──> DEAD ──restart──> start ...
                                     └──leave──> DRAINING ──empty, late or dead──> the end

One `Keeper` for each replica, one task for each keeper. Knows one worker; the controller knows all.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from cluster.runtime.interface import Runtime, RuntimeUnavailable, WorkerGone, WorkerHandle, WorkerOrder
from cluster.runtime.placement import needed
from cluster.spec import ClusterSpec, PoolSpec, Role
from cluster.view import WorkerState, WorkerView
from kvtransfer.errors import TransferError, TransportUnavailable
from workers.config import WorkerConfig
from workers.errors import ModelError, WorkerError
from workers.stats import WorkerInfo, WorkerStats

logger = logging.getLogger(__name__)

START_AGAIN_S, MOST_AGAIN_S = 5.0, 300.0  # one that never ran is tried again after twice as long each time
RETRY_S = 0.2  # between calls to a process that is coming up


@dataclass(frozen=True, slots=True)
class Keeping:
    """What all keepers of a controller share. `changed` is called after every change of a keeper's `view`."""

    runtime: Runtime
    start_timeout_s: float
    introduce: Callable[["Keeper"], Awaitable[None]]
    changed: Callable[[], None]


class Keeper:
    """Owned by the Controller. One that is not `required` came later: whatever is wrong with it, it is tried again."""

    def __init__(
        self, pool: PoolSpec, order: WorkerOrder, keeping: Keeping, *, role: Role | None = None, required: bool = True
    ) -> None:
        self.pool = pool
        self.order = order
        self.handle: WorkerHandle | None = None
        self.info: WorkerInfo | None = None
        state = WorkerState.STARTING
        self.view = WorkerView(
            order.config.name,
            pool.name,
            role or pool.role,
            state,
            waits_for=needed(order.resources, pool.parallel),
            parallel=pool.parallel,
        )
        self.required = required
        self.introduced = False  # its peers know this incarnation
        self.is_leaving = False
        self.is_over = False
        self.fatal: Exception | None = None  # the specification's fault: trying again cannot help
        self._keeping = keeping
        self._again_s = START_AGAIN_S
        self._task: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()

    @property
    def name(self) -> str:
        return self.order.config.name

    @property
    def role(self) -> Role:
        return self.view.role

    def begin(self) -> None:
        self._task = asyncio.ensure_future(self._keep())

    async def end(self, grace_s: float) -> None:
        """Stop keeping, tell everybody that it is dead, and stop the worker."""
        self.is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._show(WorkerState.DEAD, detail="it was taken out", waits_for="")
        if self.handle is not None:
            await self._keeping.runtime.stop_worker(self.handle, grace_s)

    def assign(self, role: Role) -> None:
        """From now on it is published with this role; what runs there goes on."""
        self._publish(replace(self.view, role=role))

    def leave(self) -> None:
        """From now on nobody sends it work. When it dies, it stays dead."""
        self.is_leaving = True
        if self.view.state is WorkerState.READY:
            self._show(WorkerState.DRAINING)

    async def emptied(self, quiet_s: float) -> None:
        """Return when it has had no work for `quiet_s` on end, or is dead; while it starts, it is waited for.

        What gateways sent before they heard that it leaves may come within that time.
        """
        clock = asyncio.get_running_loop()
        empty_since_s: float | None = None
        while self.view.state in (WorkerState.DRAINING, WorkerState.STARTING):
            if not is_empty(self.view.stats):
                empty_since_s = None
            elif empty_since_s is None:
                empty_since_s = clock.time()
            elif clock.time() - empty_since_s >= quiet_s:
                return
            await self._heard.wait()

    async def _keep(self) -> None:
        while self.fatal is None:
            try:
                await self._run_once()
            except (ModelError, RuntimeUnavailable, TransportUnavailable) as error:
                logger.error("worker %s cannot run: %s", self.name, error)
                if self.is_leaving:
                    return self._show(WorkerState.DEAD, detail=str(error))
                if self.view.incarnation:  # it ran before: a disk or a hub that is away for a while
                    self._show(WorkerState.DEAD, detail=str(error), restarts=self.view.restarts + 1)
                    await asyncio.sleep(START_AGAIN_S)
                elif not self.required:  # no room yet, perhaps
                    self._show(WorkerState.STARTING if self.handle is None else WorkerState.DEAD, detail=str(error))
                    await asyncio.sleep(self._again_s)
                    self._again_s = min(2 * self._again_s, MOST_AGAIN_S)
                else:
                    self.fatal = error
                    self._show(WorkerState.DEAD, detail=str(error))
            except (WorkerGone, WorkerError, TransferError, TimeoutError) as error:
                reason = str(error) or "it was silent"
                if self.is_leaving:
                    logger.warning("worker %s died while it was leaving: %s", self.name, reason)
                    return self._show(WorkerState.DEAD, detail=reason)
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
            self.handle = await self._keeping.runtime.start_worker(self.order)
            self._show(WorkerState.STARTING, detail="", waits_for="")
        elif self.view.state is WorkerState.DEAD:
            runtime = self._keeping.runtime
            self.handle = await runtime.restart_worker(self.order, self.handle, self.view.incarnation)
        self.introduced = False
        self._show(WorkerState.STARTING)
        self.info = await self._started(self.handle)
        await self._keeping.introduce(self)
        self._show(
            WorkerState.DRAINING if self.is_leaving else WorkerState.READY,
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
        async with asyncio.timeout(self._keeping.start_timeout_s):
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
            self._pulse()

    def _show(self, state: WorkerState, **facts: str | int) -> None:
        self._publish(replace(self.view, state=state, **facts))

    def _publish(self, view: WorkerView) -> None:
        self.view = view
        self._pulse()
        self._keeping.changed()

    def _pulse(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()


def order_of(spec: ClusterSpec, pool: PoolSpec, name: str, secret: str) -> WorkerOrder:
    """What one replica of a pool is to be. `secret`: of this cluster's workers, for each other."""
    forms = {(each.engine.block_size, each.engine.dtype) for each in spec.pools}
    config = WorkerConfig(
        name=name,
        pool=pool.name,
        model=pool.model or spec.model,
        engine=pool.engine,
        parallel=pool.parallel,
        transfer=spec.transfer,
        executor=spec.executor,
        secret=secret,
        cpus=max(1, int(pool.resources.cpu)),
        prefix_tokens=math.lcm(*(block_size for block_size, _ in forms)),
        staging_bytes=spec.transfer.staging_bytes if len(forms) > 1 else 0,
        cost=pool.cost,
    )
    health = spec.health
    return WorkerOrder(config, pool.resources, health.heartbeat_s, health.dead_after_s, health.place_timeout_s)


def is_empty(stats: WorkerStats) -> bool:
    """Whether a worker has nothing to do, and holds nothing that somebody may come for."""
    return 0 < stats.total_blocks == stats.free_blocks and not (
        stats.waiting or stats.running or stats.reserved or stats.leases or stats.swapped_blocks
    )
