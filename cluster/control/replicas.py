"""Supervises one replica of a pool: starts it, tests its links to peers, watches it, restarts it when it fails.

    start ──ready──> preflight ──> READY ──silent, gone or unhealthy──> DEAD ──restart──> start ...
                                     └──leave──> DRAINING ──empty, late or dead──> stopped

One `ReplicaManager` and one task per replica. Knows one worker; the controller knows all.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from cluster.runtime.interface import Runtime, WorkerHandle, WorkerOrder, WorkerStub
from cluster.runtime.placement import needed
from cluster.runtime.runtime_errors import RuntimeUnavailable, WorkerGone
from cluster.spec import ClusterSpec, PoolSpec, Role
from diptych.view import WorkerState, WorkerView
from diptych.watchdog import patient_timeout
from kvtransfer.errors import TransferError, TransportUnavailable
from workers.config import WorkerConfig
from workers.errors import ModelError, WorkerError
from workers.request import EngineOutputs
from workers.stats import WorkerInfo, WorkerStats

logger = logging.getLogger(__name__)

RESTART_S = 1.0  # pause after the second death in a row; the first restart is immediate
START_RETRY_S = 5.0  # pause after a failed start
MAX_RESTART_PAUSE_S = 300.0  # each further failure in a row doubles the pause up to this
STEADY_S = 10.0  # a worker that was ready for this long resets the count of failures in a row
REMOVED = "removed by the controller"
CRASH_LOOP = 3  # failures in a row that count as a crash loop
RETRY_S = 0.2  # between calls to a process that is starting
IMPOSSIBLE = (ModelError, RuntimeUnavailable, TransportUnavailable)  # at a first start: the configuration is wrong
EXPECTED = (*IMPOSSIBLE, WorkerGone, WorkerError, TransferError, TimeoutError)


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """Shared by all replicas of a controller. `changed` is called with the name after every change of a `view`."""

    runtime: Runtime
    start_timeout_s: float
    preflight: Callable[["ReplicaManager"], Awaitable[None]]
    changed: Callable[[str], None]


class ReplicaManager:
    """Owned by the Controller, one per worker. Restarts the worker after every failure. Only a `required` worker, which
    the cluster starts with, gives up if its configuration is wrong.
    """

    def __init__(
        self,
        pool: PoolSpec,
        order: WorkerOrder,
        context: ReplicaContext,
        *,
        role: Role | None = None,
        required: bool = True,
    ) -> None:
        self.name = order.config.name
        self.pool = pool
        self.order = order
        self.handle: WorkerHandle | None = None
        self.stub: WorkerStub | None = None  # of the incarnation that runs
        self.info: WorkerInfo | None = None
        self.view = WorkerView(
            self.name,
            pool.name,
            role or pool.role,
            WorkerState.STARTING,
            waits_for=needed(order.resources, pool.parallel),
            parallel=pool.parallel,
        )
        self.required = required
        self.passed_preflight = False  # its peers know this incarnation
        self.is_leaving = False
        self.is_over = False
        self.fatal: Exception | None = None  # the configuration is wrong: a retry cannot help
        self._context = context
        self._in_a_row = 0  # failures since it was last steady
        self._ready_s: float | None = None  # when it became ready
        self._died_s: float | None = None  # when it stopped being ready
        self._last_failure = ""  # until it is ready again
        self._task: asyncio.Task[None] | None = None
        self._changed: asyncio.Event | None = None  # while somebody waits for the next change

    @property
    def role(self) -> Role:
        return self.view.role

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._supervise())

    async def end(self, grace_s: float) -> None:
        """Stop supervising, publish that it is dead, and stop the worker."""
        self.is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._show(WorkerState.DEAD, detail=REMOVED, waits_for="")
        if self.handle is not None:
            await self._context.runtime.stop_worker(self.handle, grace_s)

    def assign(self, role: Role) -> None:
        """Publish another role. Running requests continue."""
        self._publish(replace(self.view, role=role))

    def leave(self) -> None:
        """Drain: no new work, and no restart if it dies."""
        self.is_leaving = True
        if self.view.state is WorkerState.READY:
            self._show(WorkerState.DRAINING)

    async def emptied(self, quiet_s: float) -> None:
        """Wait until it has had no work for `quiet_s`, or is dead. Waits for a worker that still starts.

        Requests that gateways sent before they knew of the drain may arrive within `quiet_s`.
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
            self._changed = self._changed or asyncio.Event()
            await self._changed.wait()

    async def _supervise(self) -> None:
        """Restart it after every failure, until it leaves or its configuration is wrong."""
        while True:
            try:
                await self._run_once()
            except Exception as error:
                wait_s = self._failed(error)
                if wait_s is None:
                    return
                await asyncio.sleep(wait_s)

    def _failed(self, error: Exception) -> float | None:
        """Publish the failure. Returns the seconds until the next start; None: no further start."""
        reason = self._reason(error)
        self.passed_preflight = False
        if self.is_leaving:
            logger.warning("worker %s died while it drained: %s", self.name, reason)
            self._show(WorkerState.DEAD, detail=reason)
            return None
        died = _is_death(error) or self.view.state is WorkerState.READY
        trace = None if isinstance(error, EXPECTED) else error
        logger.error("worker %s failed: %s", self.name, reason, exc_info=trace)
        if self.required and not self.view.incarnation and isinstance(error, IMPOSSIBLE):
            self.fatal = error
            self._show(WorkerState.DEAD, detail=reason)
            return None
        self._in_a_row = 1 if self._is_steady() else self._in_a_row + 1
        self._ready_s = None
        if self._died_s is None and self.view.incarnation:
            self._died_s = asyncio.get_running_loop().time()
        wait_s = pause_s(self._in_a_row, died=died)
        if self.handle is None:  # not placed: there is no process to restart
            self._show(WorkerState.STARTING, detail=reason)
            return wait_s
        self._last_failure = f"died: {reason}" if died else f"cannot start: {reason}"
        if self._in_a_row >= CRASH_LOOP:
            self._last_failure = f"crash loop, {self._in_a_row} failures in a row, the last: {self._last_failure}"
        again = f"next start in {wait_s:.0f} s" if wait_s else "restarting"
        restarts = self.view.restarts + 1
        self._show(
            WorkerState.DEAD, detail=f"{self._last_failure}; {again}", restarts=restarts, failures=self._in_a_row
        )
        return wait_s

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            if self.view.state in (WorkerState.READY, WorkerState.DRAINING):
                return f"it was silent for {self.order.dead_after_s:.1f} s"
            return f"it did not start within {self._context.start_timeout_s:.0f} s"
        return str(error) if isinstance(error, EXPECTED) and str(error) else f"{type(error).__name__}: {error}"

    def _is_steady(self) -> bool:
        """Whether it has been ready long enough to reset the count of failures."""
        return self._ready_s is not None and asyncio.get_running_loop().time() - self._ready_s >= STEADY_S

    async def _run_once(self) -> None:
        """Start it and watch it until it dies. Always raises."""
        if self.handle is None:
            self.handle = await self._context.runtime.start_worker(self.order)
            self._show(WorkerState.STARTING, detail="", waits_for="")
        elif self.view.state is WorkerState.DEAD:
            runtime = self._context.runtime
            self.handle = await runtime.restart_worker(self.order, self.handle, self.view.incarnation)
        self.passed_preflight = False
        self._show(WorkerState.STARTING, detail=f"{self._last_failure}; restarting" if self._last_failure else "")
        self.info = await self._started(self.handle)
        self.stub = self.handle.at(self.info.incarnation)
        try:
            await self._serve(self.info, self.stub)
        finally:
            await self.stub.disconnect()

    async def _serve(self, info: WorkerInfo, stub: WorkerStub) -> None:
        """Introduce the started worker to its peers, publish it, and watch it until it dies. Always raises."""
        await self._context.preflight(self)
        self._ready_s = asyncio.get_running_loop().time()
        self._show(
            WorkerState.DRAINING if self.is_leaving else WorkerState.READY,
            incarnation=info.incarnation,
            node=info.node,
            pid=info.pid,
            capacity_tokens=info.capacity_tokens,
            memory_bytes=info.memory_bytes,
            kv_token_bytes=sum(each.layout.block_bytes // each.layout.block_size for each in info.peer.shards),
            disk_byte_s=info.disk_byte_s,
            remote_byte_s=info.remote_byte_s,
            remote_store=info.remote_store,
            detail=self._recovery(),
        )
        await self._listen(stub)

    def _recovery(self) -> str:
        """Text for a worker that is ready again; otherwise empty."""
        failure, self._last_failure = self._last_failure, ""
        if self._died_s is None:
            return ""
        away_s = asyncio.get_running_loop().time() - self._died_s
        self._died_s = None
        logger.warning("worker %s is back after %.1f s", self.name, away_s)
        return f"back after {away_s:.0f} s ({failure})"

    async def _started(self, handle: WorkerHandle) -> WorkerInfo:
        """Start it. Retries until the timeout, because a process that restarts refuses calls at first."""
        async with asyncio.timeout(self._context.start_timeout_s):
            while True:
                try:
                    return await handle.start()
                except WorkerGone as error:
                    logger.debug("worker %s is not up yet: %s", self.name, error)
                    await asyncio.sleep(RETRY_S)

    async def _listen(self, stub: WorkerStub) -> None:
        """Take its heartbeats until it dies. The controller has no requests, so it gets no outputs."""
        async with patient_timeout(self.order.dead_after_s, shares_ticks=True) as silence:

            def on_heartbeat(message: EngineOutputs) -> None:
                silence.reset()
                self._take(message.stats)

            await stub.subscribe(f"controller-{uuid.uuid4().hex[:12]}", on_heartbeat)

    def _take(self, stats: WorkerStats) -> None:
        if stats is not self.view.stats:
            self.view = replace(self.view, stats=stats)  # not published: statistics are not membership
        self._notify()
        if (self.view.detail or self.view.failures) and self._is_steady():
            self._in_a_row = 0
            self._show(self.view.state, detail="", failures=0)

    def _show(self, state: WorkerState, **facts: str | float) -> None:
        stats = WorkerStats() if state is WorkerState.DEAD else self.view.stats  # they ended with its process
        self._publish(replace(self.view, state=state, stats=stats, **facts))

    def _publish(self, view: WorkerView) -> None:
        self.view = view
        self._notify()
        self._context.changed(self.name)

    def _notify(self) -> None:
        if self._changed is not None:  # at every heartbeat
            self._changed.set()
            self._changed = None


def order_of(spec: ClusterSpec, pool: PoolSpec, name: str, secret: str) -> WorkerOrder:
    """The order for one replica of a pool. `secret`: shared by the workers of the cluster."""
    model = pool.model or spec.model
    kv_formats = {(each.engine.block_size, each.engine.dtype) for each in spec.pools_of(model)}
    config = WorkerConfig(
        name=name,
        pool=pool.name,
        model=model,
        engine=pool.engine,
        cache=pool.cache,
        parallel=pool.parallel,
        transfer=spec.transfer,
        executor=spec.executor,
        secret=secret,
        cpus=max(1, int(pool.resources.cpu)),
        prefix_tokens=math.lcm(*(block_size for block_size, _ in kv_formats)),
        staging_bytes=spec.transfer.staging_bytes if len(kv_formats) > 1 else 0,
        cost=pool.cost,
        memory_part=_memory_part(spec, pool),
    )
    health = spec.health
    return WorkerOrder(config, pool.resources, health.heartbeat_s, health.dead_after_s, health.place_timeout_s)


def _memory_part(spec: ClusterSpec, pool: PoolSpec) -> float:
    """The share of a GPU that Ray reserves; without GPUs, an equal share of the host per possible rank."""
    if pool.resources.gpu:
        return min(1.0, pool.resources.gpu)
    return 1.0 / max(1, sum(each.max_ranks for each in spec.pools if not each.resources.gpu))


def pause_s(failures: int, *, died: bool) -> float:
    """Seconds to wait after this many failures in a row."""
    if not died:
        return float(min(MAX_RESTART_PAUSE_S, START_RETRY_S * 2 ** min(failures - 1, 16)))
    return 0.0 if failures == 1 else float(min(MAX_RESTART_PAUSE_S, RESTART_S * 2 ** min(failures - 2, 16)))


def _is_death(error: Exception) -> bool:
    """Whether the process died. After a refused start it is alive."""
    return isinstance(error, WorkerGone | TransferError | TimeoutError) and not isinstance(error, TransportUnavailable)


def is_empty(stats: WorkerStats) -> bool:
    """Whether a worker has no work, and no blocks for another worker."""
    return 0 < stats.total_blocks == stats.free_blocks and not (
        stats.waiting or stats.running or stats.reserved or stats.leases
    )
