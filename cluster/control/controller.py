"""The controller: owns the target set of workers, the running workers, and the links between them.

It restarts failed workers, changes roles and pool sizes for operators and the scaling loop, and publishes the
membership by long poll. Requests do not pass through it. While it is away, gateways use the last membership.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from cluster.control.changes import (
    MAX_DRAIN_S,
    ChangeRefused,
    ControllerState,
    ServerReport,
    StaleRevision,
    TargetWorker,
    UnknownMember,
)
from cluster.control.membership import Membership, PollingGateways, Revisions, task_failures
from cluster.control.pools import (
    free_name,
    in_order,
    is_ready,
    least_busy,
    pool_views,
    refuse_below_floors,
    refuse_beyond_bounds,
    worker_name,
)
from cluster.control.preflight import Preflight
from cluster.control.replicas import ReplicaContext, ReplicaManager, order_of
from cluster.control.scaling_loop import ScalingLoop, ScalingPolicy
from cluster.control.supervision import Failures, supervised
from cluster.policy.policy import open_policy
from cluster.policy.scaling.offered_load import LoadReport
from cluster.runtime.interface import Runtime
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import ClusterSpec, PoolSpec, Role
from diptych.view import Adapter, ClusterView, DecisionRecord, ModelView, PoolView, WorkerState
from diptych.watchdog import Watchdog

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
NOT_BEGUN = "the controller was restarted and has not begun"
SILENT_S = 5.0  # a gateway that does not poll for this long after an answer is gone
QUIET_S = 1.0  # how long a draining worker must be empty; requests in transit arrive within this time
REVISIONS_APART = 1_000_000  # more than a controller makes between two keep-alives, so that none is used twice
MAX_ADAPTERS = 1024  # each membership has them all
NOTHING_REPORTED = ServerReport()


class Controller:
    """One per cluster. Owns the replica managers. `scaling_policy`: the elastic policy, if there is one."""

    def __init__(
        self,
        spec: ClusterSpec,
        runtime: Runtime,
        secret: str,
        *,
        orphan_after_s: float | None = None,
        scaling_policy: ScalingPolicy | None = None,
    ) -> None:
        self._spec = spec
        self._runtime = runtime
        self._secret = secret
        self._pools = {pool.name: pool for pool in spec.pools}
        links_all = open_policy(spec, seed=0).links_all
        self._preflight = Preflight(links_all, spec.gateway.rebalance, spec.transfer.read_timeout_s, self._bump)
        self._failures = Failures(self._bump)
        self._context = ReplicaContext(runtime, spec.health.start_timeout_s, self._run_preflight, self._bump)
        self._replicas: dict[str, ReplicaManager] = {}
        self._polling = PollingGateways()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._relinking: asyncio.Task[None] | None = None
        self._revisions = Revisions()
        self._targets_at = 0  # the revision of the latest change of the state to store
        self._adapters: dict[str, Adapter] = {}
        self._pool_views: tuple[PoolView, ...] = ()
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()  # one change at a time, so that revisions can be checked
        self._orphan_after_s = orphan_after_s
        self._orphan_timer: Watchdog | None = None
        self._server = ServerReport()
        self._stopping: asyncio.Task[None] | None = None
        self._scaling_loop: ScalingLoop | None = None
        if scaling_policy is not None:
            limit_s = spec.health.place_timeout_s + spec.health.start_timeout_s + spec.health.drain_s
            acts = spec.elastic.mode == "act"
            self._scaling_loop = ScalingLoop(scaling_policy, self, spec.elastic.period_s, limit_s, acts=acts)

    # ---- start and stop --------------------------------------------------------------------------------------

    async def start(self, saved: ControllerState | None = None) -> None:
        """Start all workers, without waiting for them. `saved`: the state of a crashed controller, to take over."""
        if self._relinking is not None:
            return
        if saved is None:
            pools = self._spec.pools
            workers = [
                TargetWorker(worker_name(pool, index), pool.name, pool.role)
                for pool in pools
                for index in range(pool.replicas)
            ]
        else:
            workers, self._revisions.now = list(saved.workers), saved.revision + REVISIONS_APART
            self._adapters = {each.name: each for each in saved.adapters}
        for worker in workers:
            replica = self._add(self._pools[worker.pool], worker.name, worker.role, required=saved is None)
            if worker.is_leaving:
                self._leave(replica, self._spec.health.drain_s, waits=True)
        relinking = supervised("linking workers", self._preflight.relink_failed_pairs, self._failures)
        self._relinking = asyncio.ensure_future(relinking)
        if self._scaling_loop is not None:
            self._scaling_loop.start(self._failures)
        self._target_changed()
        self._reset_orphan_timer()

    async def keep_alive(
        self, revision: int, timeout_s: float, report: ServerReport = NOTHING_REPORTED
    ) -> ControllerState | None:
        """The server's heartbeat. After `orphan_after_s` without one, the controller stops the cluster.

        Long poll: returns the state to store once the target workers differ from those of `revision`, or after
        `timeout_s`. None: this controller was restarted and must `start` with the stored state.
        """
        if self._relinking is None:
            return None
        self._reset_orphan_timer()
        if report != self._server:
            self._server = report
            self._bump()
        await self._wait_until(lambda: self._targets_at > revision, timeout_s)
        replicas = self._replicas.values()
        workers = (TargetWorker(each.name, each.pool.name, each.role, each.is_leaving) for each in replicas)
        return ControllerState(self._revisions.now, tuple(workers), tuple(self._adapters.values()))

    def _reset_orphan_timer(self) -> None:
        if self._orphan_timer is not None:
            self._orphan_timer.reset()
        elif self._orphan_after_s is not None:
            self._orphan_timer = Watchdog(self._orphan_after_s, self._orphaned)

    def _orphaned(self) -> None:
        logger.warning("no keep-alive from the server for %.0f s: stopping the cluster", self._orphan_after_s or 0.0)
        self._stopping = asyncio.ensure_future(self._stop_all())

    async def _stop_all(self) -> None:
        await self.stop()
        await self._runtime.end_all()

    async def stop(self) -> None:
        """End every worker."""
        if self._orphan_timer is not None:
            self._orphan_timer.close()
        if self._relinking is not None:
            self._relinking.cancel()
        if self._scaling_loop is not None:
            self._scaling_loop.close()
        running = [replica for replica in self._replicas.values() if not replica.is_over]
        for replica in running:
            if leaving := self._leaving.pop(replica.name, None):
                leaving.cancel()
        await asyncio.gather(*(replica.end(STOP_GRACE_S) for replica in running), *self._leaving.values())

    async def ready(self, timeout_s: float) -> tuple[ModelView, ...] | None:
        """The models once every worker of the specification is ready; None after `timeout_s`.

        Raises the error that keeps a worker from ever starting (`ModelError`, `RuntimeUnavailable`).
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (models := self._models()) is None or not all(map(is_ready, self._required())):
                    for replica in self._required():
                        if replica.fatal is not None:
                            raise replica.fatal
                    await self._changed.wait()
        except TimeoutError:
            return None
        return models

    def _required(self) -> list[ReplicaManager]:
        return [each for each in self._replicas.values() if each.required]

    def _models(self) -> tuple[ModelView, ...] | None:
        """The served models in order; None until a worker has loaded each."""
        known = {self._model_of(each): each.info for each in self._replicas.values() if each.info is not None}
        if known.keys() != set(self._spec.models):
            return None
        infos = ((name, known[name]) for name in self._spec.models)
        return tuple(
            ModelView(name, info.context_length, info.vocab_size, info.default_sampling) for name, info in infos
        )

    def _model_of(self, replica: ReplicaManager) -> str:
        return replica.pool.model or self._spec.model

    def _peers(self, replica: ReplicaManager) -> Callable[[], Iterable[ReplicaManager]]:
        """The workers of its model: only these exchange KV."""
        model = self._model_of(replica)
        return lambda: [each for each in self._replicas.values() if self._model_of(each) == model]

    # ---- published state -------------------------------------------------------------------------------------

    async def spec_and_models(self, timeout_s: float) -> tuple[ClusterSpec, tuple[ModelView, ...]] | None:
        """For a joining gateway, once workers have loaded the models; None after `timeout_s`.

        Raises `WorkerGone`, see `members`.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while (models := self._models()) is None and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            await self._wait_for_change(self._revisions.now, left_s)
        if self._relinking is None:
            raise WorkerGone(NOT_BEGUN)
        return None if models is None else (self._spec, models)

    async def members(self, revision: int, timeout_s: float, gateway: str = "", links_id: str = "") -> Membership:
        """The membership, once it differs from `revision` or after `timeout_s` (long poll). `gateway`: the caller.

        Omits the links if the caller has those of `links_id`, and, if this controller made them, the members that did
        not change since `revision`. Raises `WorkerGone` if this controller was restarted and has not begun.
        """
        clock = asyncio.get_running_loop().time
        is_ours = self._preflight.made(links_id)
        if gateway:
            self._polling.polled(gateway, clock(), clock() + timeout_s + SILENT_S)
        if is_ours or not links_id:
            await self._wait_for_change(revision, timeout_s)
        if gateway:
            await asyncio.sleep(self._polling.answer_s(gateway, clock()) - clock())
        if self._relinking is None:
            raise WorkerGone(NOT_BEGUN)
        since = revision if is_ours else 0
        names = self._revisions.since(since) if since else self._replicas
        changed = [self._replicas[name] for name in names if name in self._replicas]
        view = self._view(changed, gateways=self._polling.names(clock()))
        if links_id == self._preflight.links_id:
            view = replace(view, links=(), unlinked=frozenset())
        return Membership(
            view=view,
            handles={replica.name: replica.handle for replica in changed},
            links_id=self._preflight.links_id,
            since=since,
            names=tuple(self._replicas) if since and self._revisions.names_changed(since) else None,
        )

    async def unlinked(self, owner: str, reader: str) -> None:
        """A gateway reports that a worker could not connect to an owner of KV. The pair is not used until it passes
        preflight again. Ignores unknown workers.
        """
        if owner in self._replicas and reader in self._replicas:
            self._preflight.mark_unlinked(self._replicas[owner], self._replicas[reader])

    async def _wait_for_change(self, revision: int, timeout_s: float) -> None:
        await self._wait_until(lambda: self._revisions.now != revision, timeout_s)

    async def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait until this controller has begun and it is so, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._relinking is None or not is_so():
                    await self._changed.wait()

    def view(self) -> ClusterView:
        """The view that gateways get."""
        model, *other_models = self._models() or (None,)
        return replace(self._view(self._replicas.values()), model=model, other_models=tuple(other_models))

    def _view(self, replicas: Iterable[ReplicaManager], gateways: tuple[str, ...] = ()) -> ClusterView:
        """Without models, which gateways know."""
        return ClusterView(
            revision=self._revisions.now,
            name=self._spec.name,
            model=None,
            workers=tuple(replica.view for replica in replicas),
            links=self._preflight.links,
            unlinked=self._preflight.unlinked,
            pools=self._pool_views,
            gateways=gateways,
            served_gateways=self._server.gateways,
            failures=task_failures(server=self._server.failures, controller=self._failures.counts()),
            adapters=tuple(self._adapters.values()),
        )

    def _bump(self, name: str = "") -> None:
        """Publish a change; `name`: of this worker."""
        self._revisions.changed(name)
        self._changed.set()
        self._changed = asyncio.Event()

    def _target_changed(self) -> None:
        """Publish a change of the target workers."""
        self._pool_views = pool_views(self._spec, self._replicas.values())
        self._revisions.renamed()
        self._bump()
        self._targets_at = self._revisions.now

    # ---- changes ---------------------------------------------------------------------------------------------

    async def flip(self, worker: str, role: Role, revision: int = 0) -> int:
        """Change a worker's role; its running requests continue. Returns the new revision.

        `revision`, in all changes: the one that the caller has seen; 0: any. Errors: `ChangeError`, and `WorkerGone` as
        `members`.
        """
        async with self._change(revision):
            replica = self._find(worker)
            if replica.is_leaving:
                raise ChangeRefused(f"{worker} is draining and takes no new work in any role")
            if replica.role is role:
                return self._revisions.now
            if not is_ready(replica):
                state = replica.view.state.value
                raise ChangeRefused(f"{worker} is {state}, not ready; flip it when it is")
            self._refuse_below_floors({worker: role})
            before = replica.role
            await self._preflight.flip(replica, role, self._peers(replica))
            self._targets_at = self._revisions.now
            logger.info("%s: role set to %s, was %s", worker, role.value, before.value)
            return self._revisions.now

    async def drain(self, worker: str, revision: int = 0, deadline_s: float = 0.0) -> int:
        """Send a worker no new work, and stop it once it is empty or after `deadline_s` (0: `health.drain_s`).

        Lowers its pool's target by one. Does not wait until it has stopped. Errors: `ChangeError`.
        """
        async with self._change(revision):
            if not 0.0 <= deadline_s <= MAX_DRAIN_S:
                raise ChangeRefused(f"a drain takes at most {MAX_DRAIN_S:.0f} s, not {deadline_s:g} s")
            replica = self._find(worker)
            if replica.is_leaving:
                return self._revisions.now
            now = len(self._workers_of(replica.pool.name))
            refuse_beyond_bounds(replica.pool, now, now - 1)
            self._refuse_below_floors({worker: None})
            self._leave(replica, deadline_s or self._spec.health.drain_s)
            return self._revisions.now

    async def scale(self, pool: str, replicas: int, revision: int = 0) -> int:
        """Set a pool's target: start workers, or drain those with the least work.

        Waits for neither. Errors: `ChangeError`.
        """
        async with self._change(revision):
            if pool not in self._pools:
                raise UnknownMember(f"no pool {pool!r}; there are {', '.join(self._pools)}")
            spec, workers = self._pools[pool], self._workers_of(pool)
            refuse_beyond_bounds(spec, len(workers), replicas)
            leaving = least_busy(workers, len(workers) - replicas, self._refuse_below_floors)
            for _ in range(replicas - len(workers)):
                self._add(spec, free_name(spec, self._replicas), spec.role, required=False)
            for replica in leaving:
                self._leave(replica, self._spec.health.drain_s)
            if replicas != len(workers):
                logger.info("%s: target set to %d workers, was %d", pool, replicas, len(workers))
                self._replicas = in_order(self._replicas, self._spec.pools)
                self._target_changed()
            return self._revisions.now

    async def load_adapter(self, adapter: Adapter, revision: int = 0) -> int:
        """Serve an adapter, which the caller has checked. Workers load it when a request needs it."""
        async with self._change(revision):
            known = self._adapters.get(adapter.name)
            if known == adapter:
                return self._revisions.now
            if known is not None:
                raise ChangeRefused(f"adapter {adapter.name!r} is {known.path} with other content; unload it first")
            if len(self._adapters) >= MAX_ADAPTERS:
                raise ChangeRefused(f"{MAX_ADAPTERS} adapters are served already; unload one first")
            return self._set_adapters({**self._adapters, adapter.name: adapter})

    async def unload_adapter(self, name: str, revision: int = 0) -> int:
        """Refuse new requests for an adapter. Running ones go on."""
        async with self._change(revision):
            if name not in self._adapters:
                raise UnknownMember(f"no adapter {name!r}; there are {', '.join(self._adapters) or 'none'}")
            return self._set_adapters({each: adapter for each, adapter in self._adapters.items() if each != name})

    def _set_adapters(self, adapters: dict[str, Adapter]) -> int:
        self._adapters = adapters
        self._bump()
        self._targets_at = self._revisions.now
        logger.info("adapters: %s", ", ".join(adapters) or "none")
        return self._revisions.now

    async def drain_workers(self, workers: Collection[str], deadline_s: float) -> int:
        """Drain the workers of a node that leaves, and start a replacement for each on any node with room.

        Nodes leave one at a time: while another worker is not ready, this waits for up to half of `deadline_s`. Floors
        and bounds do not apply. Ignores unknown and draining workers.
        """
        clock = asyncio.get_running_loop().time
        ends_s = clock() + deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s / 2):
                while self._not_leaving(workers) and any(
                    not (is_ready(each) or each.is_leaving or each.name in workers) for each in self._replicas.values()
                ):
                    await self._changed.wait()
        async with self._change():
            for replica in (leaving := self._not_leaving(workers)):
                name = free_name(replica.pool, self._replicas)
                self._add(replica.pool, name, replica.role, required=False)
                logger.info("the node of worker %s leaves; %s replaces it", replica.name, name)
                self._leave(replica, ends_s - clock())
            if leaving:
                self._replicas = in_order(self._replicas, self._spec.pools)
                self._target_changed()
            return self._revisions.now

    def _not_leaving(self, workers: Collection[str]) -> list[ReplicaManager]:
        return [each for each in self._replicas.values() if each.name in workers and not each.is_leaving]

    async def report(self, report: LoadReport) -> None:
        """Take a gateway's load report."""
        if self._scaling_loop is not None:
            self._scaling_loop.on_report(report)

    async def decisions(self) -> tuple[DecisionRecord, ...]:
        """The latest decisions of the elastic policy, oldest first."""
        return () if self._scaling_loop is None else self._scaling_loop.decisions()

    async def decision_counts(self) -> tuple[tuple[str, str, int], ...]:
        """Decisions of the elastic policy since this controller started: (kind, outcome, count)."""
        return () if self._scaling_loop is None else self._scaling_loop.counts()

    @contextlib.asynccontextmanager
    async def _change(self, revision: int = 0) -> AsyncIterator[None]:
        """One change at a time. Raises `StaleRevision`, and `WorkerGone` as `members`."""
        async with self._changing:
            if self._relinking is None:
                raise WorkerGone(NOT_BEGUN)
            now = self._revisions.now
            if revision and revision != now:
                raise StaleRevision(
                    f"revision {revision} was expected, but the cluster is at {now}; check and repeat the change"
                )
            yield

    def _find(self, worker: str) -> ReplicaManager:
        replica = self._replicas.get(worker)
        if replica is None:
            raise UnknownMember(f"no worker {worker!r}; there are {', '.join(self._replicas)}")
        return replica

    def _workers_of(self, pool: str) -> list[ReplicaManager]:
        """The workers that count toward a pool's target."""
        return [each for each in self._replicas.values() if each.pool.name == pool and not each.is_leaving]

    def _refuse_below_floors(self, becomes: Mapping[str, Role | None]) -> None:
        for model in self._spec.models:
            workers = [each for each in self._replicas.values() if self._model_of(each) == model]
            refuse_below_floors(self._spec.elastic.floors, workers, becomes)

    def _add(self, pool: PoolSpec, name: str, role: Role, *, required: bool) -> ReplicaManager:
        replica = self._replicas[name] = ReplicaManager(
            pool, order_of(self._spec, pool, name, self._secret), self._context, role=role, required=required
        )
        replica.start()
        self._bump(name)
        return replica

    def _leave(self, replica: ReplicaManager, deadline_s: float, *, waits: bool = False) -> None:
        """Drain. `waits`: until it is empty, even if it is not ready; a crashed controller's worker may have work."""
        replica.leave()
        self._target_changed()
        logger.info("worker %s drains and stops within %.0f s", replica.name, deadline_s)
        waits = waits or replica.view.state is WorkerState.DRAINING
        self._leaving[replica.name] = asyncio.ensure_future(
            self._end_when_empty(replica, deadline_s if waits else None)
        )

    async def _end_when_empty(self, replica: ReplicaManager, deadline_s: float | None) -> None:
        """Stop a draining worker once it is empty, or at the deadline; its remaining requests then fail over."""
        if deadline_s is not None:
            linking = asyncio.ensure_future(self._preflight.link_draining(replica, self._peers(replica)))
            try:
                async with asyncio.timeout(deadline_s):
                    await replica.emptied(QUIET_S)
            except TimeoutError:
                logger.warning("worker %s is stopped with work left after %.0f s", replica.name, deadline_s)
            finally:
                linking.cancel()
        try:
            await replica.end(STOP_GRACE_S)
            logger.info("worker %s has left", replica.name)
        except Exception:  # the runtime ends its process, at the latest with the cluster
            logger.exception("worker %s could not be stopped", replica.name)
        # Only now, so that a restarted controller knows that it has to stop this worker.
        del self._replicas[replica.name]
        self._leaving.pop(replica.name, None)
        self._preflight.forget(replica.name)
        self._target_changed()

    async def _run_preflight(self, new: ReplicaManager) -> None:
        await self._preflight.test_new(new, self._peers(new))
