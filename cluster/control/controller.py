"""The controller: which workers there shall be, which there are, and which pairs may move KV.

It keeps every worker alive, changes roles and numbers as it is told (by an operator or by the elastic policy), and
publishes the membership as a long poll. Requests do not pass through it: gateways go on with the last membership while
it is away.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping

from cluster.control.changes import (
    LONGEST_DRAIN_S,
    ChangeRefused,
    Memory,
    Post,
    ServerReport,
    StaleRevision,
    Taken,
    UnknownMember,
)
from cluster.control.floors import index_of, is_ready, least_busy, refuse_below_floors, refuse_beyond_bounds
from cluster.control.membership import Listeners, Member, Membership
from cluster.control.preflight import Preflight
from cluster.control.replicas import Keeping, ReplicaManager, order_of
from cluster.control.scaling_loop import Decider, ScalingLoop
from cluster.control.supervised import Failures, supervised
from cluster.policy.policy import open_policy
from cluster.policy.scaling.evidence import Report
from cluster.runtime.interface import Runtime, WorkerGone
from cluster.spec import ClusterSpec, PoolSpec, Role
from diptych.view import ClusterView, ModelView, PoolView, TaskFailures, WorkerState
from diptych.watchdog import Watchdog
from workers.stats import WorkerInfo

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
NOT_BEGUN = "the controller was restarted and has not begun"
SILENT_S = 5.0  # a gateway that has its answer and does not ask again for so long is gone
QUIET_S = 1.0  # a worker that leaves must have been empty for so long: what was on its way to it has come
REVISIONS_APART = 1_000_000  # more than a controller made since it last told its revision: none is used twice
NOTHING_REPORTED = ServerReport()


class Controller:
    """One for each cluster. Owns the workers' replica managers. `decider` judges the roles; None: nobody does."""

    def __init__(
        self,
        spec: ClusterSpec,
        runtime: Runtime,
        secret: str,
        *,
        orphan_after_s: float | None = None,
        decider: Decider | None = None,
    ) -> None:
        self._spec = spec
        self._runtime = runtime
        self._secret = secret
        self._pools = {pool.name: pool for pool in spec.pools}
        links_all = open_policy(spec, seed=0).links_all
        self._preflight = Preflight(links_all, spec.gateway.rebalance, spec.transfer.read_timeout_s, self._bump)
        self._failures = Failures(self._bump)
        self._keeping = Keeping(runtime, spec.health.start_timeout_s, self._introduce, self._bump)
        self._keepers: dict[str, ReplicaManager] = {}
        self._listeners = Listeners()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._tending: asyncio.Task[None] | None = None
        self._revision = 0
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()  # one change at a time, so that its revision means something
        self._orphan_after_s = orphan_after_s
        self._orphan_timer: Watchdog | None = None
        self._server = ServerReport()
        self._stopping: asyncio.Task[None] | None = None
        self._scaling_loop: ScalingLoop | None = None
        if decider is not None:
            limit_s = spec.health.place_timeout_s + spec.health.start_timeout_s + spec.health.drain_s
            acts = spec.elastic.mode == "act"
            self._scaling_loop = ScalingLoop(decider, self, spec.elastic.period_s, limit_s, acts=acts)

    # ---- life ------------------------------------------------------------------------------------------------

    async def begin(self, memory: Memory | None = None) -> None:
        """Start all workers; does not wait for them. `memory`: of a controller that crashed; they are found again."""
        if self._tending is not None:
            return
        if memory is None:
            pools = self._spec.pools
            posts = [Post(_name(pool, index), pool.name, pool.role) for pool in pools for index in range(pool.replicas)]
        else:
            posts, self._revision = list(memory.posts), memory.revision + REVISIONS_APART
        for post in posts:
            keeper = self._hire(self._pools[post.pool], post.name, post.role, required=memory is None)
            if post.is_leaving:
                self._leave(keeper, self._spec.health.drain_s, waits=True)
        self._tending = asyncio.ensure_future(supervised("linking workers", self._preflight.tend, self._failures))
        if self._scaling_loop is not None:
            self._scaling_loop.begin(self._failures)
        self._bump()
        self._called_in()

    async def keep_alive(
        self, revision: int, timeout_s: float, report: ServerReport = NOTHING_REPORTED
    ) -> Memory | None:
        """Whoever serves this cluster calls in; when it has been away for `orphan_after_s`, everything is stopped.

        Answers what it must remember, once that is not of `revision` or after `timeout_s`; None: this controller was
        restarted and must `begin` with it.
        """
        if self._tending is None:
            return None
        self._called_in()
        if report != self._server:
            self._server = report
            self._bump()
        await self._news(revision, timeout_s)
        posts = (Post(each.name, each.pool.name, each.role, each.is_leaving) for each in self._keepers.values())
        return Memory(self._revision, tuple(posts))

    def _called_in(self) -> None:
        if self._orphan_timer is not None:
            self._orphan_timer.reset()
        elif self._orphan_after_s is not None:
            self._orphan_timer = Watchdog(self._orphan_after_s, self._orphaned)

    def _orphaned(self) -> None:
        logger.warning("nobody has called in for %.0f s: the cluster is stopped", self._orphan_after_s or 0.0)
        self._stopping = asyncio.ensure_future(self._stop_all())

    async def _stop_all(self) -> None:
        await self.stop()
        await self._runtime.end_all()

    async def stop(self) -> None:
        """End every worker."""
        if self._orphan_timer is not None:
            self._orphan_timer.close()
        if self._tending is not None:
            self._tending.cancel()
        if self._scaling_loop is not None:
            self._scaling_loop.close()
        staying = [keeper for keeper in self._keepers.values() if not keeper.is_over]
        over = [keeper.name for keeper in self._keepers.values() if keeper.is_over and keeper.name in self._leaving]
        ending = [self._leaving.pop(name) for name in over]
        for leaving in self._leaving.values():
            leaving.cancel()
        await asyncio.gather(*(keeper.end(STOP_GRACE_S) for keeper in staying), *ending)

    async def ready(self, timeout_s: float) -> ModelView | None:
        """The model's facts once every worker of the specification is ready, None when that takes longer.

        Raises what made a worker impossible (`ModelError`, `RuntimeUnavailable`).
        """
        try:
            async with asyncio.timeout(timeout_s):
                while awaited := [each for each in self._keepers.values() if each.required and not is_ready(each)]:
                    for keeper in awaited:
                        if keeper.fatal is not None:
                            raise keeper.fatal
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._model()

    def _model(self) -> ModelView | None:
        infos = (keeper.info for keeper in self._keepers.values() if keeper.info is not None)
        info: WorkerInfo | None = next(infos, None)
        if info is None:
            return None
        return ModelView(self._spec.model, info.context_length, info.vocab_size, info.default_sampling)

    # ---- what it publishes -----------------------------------------------------------------------------------

    async def described(self, timeout_s: float) -> tuple[ClusterSpec, ModelView] | None:
        """What a gateway that joins must know, once some worker has told of the model; None: not within this time.

        Raises `WorkerGone` as `members` does.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while (model := self._model()) is None and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            await self._news(self._revision, left_s)
        if self._tending is None:
            raise WorkerGone(NOT_BEGUN)
        return None if model is None else (self._spec, model)

    async def members(self, revision: int, timeout_s: float, gateway: str = "", links_id: str = "") -> Membership:
        """The membership once it is not of `revision`, or as it is after `timeout_s`. `gateway`: the one that asks.

        Links come only if they are not of `links_id`: of many workers they are by far the most of it.

        Raises `WorkerGone` from a controller that was restarted and does not know yet who there is.
        """
        clock = asyncio.get_running_loop().time
        if gateway:
            self._listeners.asked(gateway, clock(), clock() + timeout_s + SILENT_S)
        await self._news(revision, timeout_s)
        if self._tending is None:
            raise WorkerGone(NOT_BEGUN)
        members = tuple(Member(keeper.view, keeper.handle) for keeper in self._keepers.values())
        listeners = self._listeners.names(clock())
        now_id = self._preflight.links_id
        links = self._preflight.links if links_id != now_id else ()
        more = self._pool_views(), listeners, self._server.gateways, self._task_failures()
        return Membership(self._revision, members, links, *more, now_id)

    async def _news(self, revision: int, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self._tending is None or self._revision == revision:
                    await self._changed.wait()
        except TimeoutError:
            pass  # unchanged is an answer too

    def view(self) -> ClusterView:
        """What a gateway sees."""
        workers = tuple(keeper.view for keeper in self._keepers.values())
        links, pairs = self._preflight.links, self._preflight.pairs
        return ClusterView(self._revision, self._spec.name, self._model(), workers, links, pairs, self._pool_views())

    def _task_failures(self) -> tuple[TaskFailures, ...]:
        told = ("server", self._server.failures), ("controller", self._failures.told())
        return tuple(TaskFailures(process, task, count) for process, each in told for task, count in each)

    def _pool_views(self) -> tuple[PoolView, ...]:
        return tuple(
            PoolView(pool.name, pool.role, len(self._staff(pool.name)), *pool.bounds) for pool in self._spec.pools
        )

    def _bump(self) -> None:
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- changes ---------------------------------------------------------------------------------------------

    async def flip(self, worker: str, role: Role, revision: int = 0) -> int:
        """Give a worker another role; what runs there goes on. Answers the new revision.

        `revision`, in all changes: the one that the caller looked at, 0 for any. Errors: `ChangeError`.
        """
        async with self._changing:
            self._check(revision)
            keeper = self._find(worker)
            if keeper.is_leaving:
                raise ChangeRefused(f"{worker} is draining and takes no new work in any role")
            if keeper.role is role:
                return self._revision
            if not is_ready(keeper):
                state = keeper.view.state.value
                raise ChangeRefused(f"{worker} is {state}, not ready; flip it when it is")
            self._refuse_below_floors({worker: role})
            before = keeper.role
            await self._preflight.flip(keeper, role, self._keepers.values)
            logger.info("worker %s is a %s worker now, and was a %s worker", worker, role.value, before.value)
            return self._revision

    async def drain(self, worker: str, revision: int = 0, deadline_s: float = 0.0) -> int:
        """Send a worker no new work, and stop it once it is empty or after `deadline_s` (0: `health.drain_s`).

        Its pool shall have one worker fewer from now on. Does not wait for the end. Errors: `ChangeError`.
        """
        async with self._changing:
            self._check(revision)
            if not 0.0 <= deadline_s <= LONGEST_DRAIN_S:
                raise ChangeRefused(f"a drain takes at most {LONGEST_DRAIN_S:.0f} s; {deadline_s:g} s are asked for")
            keeper = self._find(worker)
            if keeper.is_leaving:
                return self._revision
            now = len(self._staff(keeper.pool.name))
            refuse_beyond_bounds(keeper.pool, now, now - 1)
            self._refuse_below_floors({worker: None})
            self._leave(keeper, deadline_s or self._spec.health.drain_s)
            return self._revision

    async def scale(self, pool: str, replicas: int, revision: int = 0) -> int:
        """Let a pool have so many workers: new ones are started, those with the least work are drained.

        Does not wait for either. Errors: `ChangeError`.
        """
        async with self._changing:
            self._check(revision)
            if pool not in self._pools:
                raise UnknownMember(f"there is no pool {pool!r}; there are {', '.join(self._pools)}")
            spec, staff = self._pools[pool], self._staff(pool)
            refuse_beyond_bounds(spec, len(staff), replicas)
            leaving = least_busy(staff, len(staff) - replicas, self._refuse_below_floors)
            for _ in range(replicas - len(staff)):
                self._hire(spec, self._free_name(spec), spec.role, required=False)
            for keeper in leaving:
                self._leave(keeper, self._spec.health.drain_s)
            if replicas != len(staff):
                logger.info("pool %s shall have %d workers, and had %d", pool, replicas, len(staff))
                self._in_order()
                self._bump()
            return self._revision

    async def vacate(self, workers: Collection[str], deadline_s: float) -> int:
        """Their nodes go: each is drained, and another worker of its pool and role is started wherever there is room.

        Nodes go one after the other: as long as a worker elsewhere is not ready yet, the next ones wait, though no
        longer than half of their time. Nothing else holds them back. Who leaves already, or is no more, is left alone.
        """
        clock = asyncio.get_running_loop().time
        ends_s = clock() + deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s / 2):
                while self._going(workers) and any(
                    not (is_ready(each) or each.is_leaving or each.name in workers) for each in self._keepers.values()
                ):
                    await self._changed.wait()
        async with self._changing:
            for keeper in self._going(workers):
                name = self._free_name(keeper.pool)
                self._hire(keeper.pool, name, keeper.role, required=False)
                logger.info("the node of worker %s goes, and %s takes its place", keeper.name, name)
                self._leave(keeper, ends_s - clock())
            self._in_order()
            return self._revision

    def _going(self, workers: Collection[str]) -> list[ReplicaManager]:
        return [each for each in self._keepers.values() if each.name in workers and not each.is_leaving]

    async def report(self, report: Report) -> None:
        """What one gateway saw lately."""
        if self._scaling_loop is not None:
            self._scaling_loop.told(report)

    async def decisions(self) -> tuple[Taken, ...]:
        """The elastic policy's, the latest last."""
        return () if self._scaling_loop is None else self._scaling_loop.taken()

    async def decision_counts(self) -> tuple[tuple[str, str, int], ...]:
        """Of the elastic policy since this controller began: kind, outcome, how many."""
        return () if self._scaling_loop is None else self._scaling_loop.counts()

    def _check(self, revision: int) -> None:
        if revision and revision != self._revision:
            raise StaleRevision(
                f"revision {revision} was expected, and the cluster is at {self._revision}; look again, and repeat it "
                "if it is still right"
            )

    def _find(self, worker: str) -> ReplicaManager:
        keeper = self._keepers.get(worker)
        if keeper is None:
            raise UnknownMember(f"there is no worker {worker!r}; there are {', '.join(self._keepers)}")
        return keeper

    def _staff(self, pool: str) -> list[ReplicaManager]:
        """The workers that a pool shall have."""
        return [each for each in self._keepers.values() if each.pool.name == pool and not each.is_leaving]

    def _refuse_below_floors(self, becomes: Mapping[str, Role | None]) -> None:
        refuse_below_floors(self._spec.elastic.floors, self._keepers.values(), becomes)

    def _hire(self, pool: PoolSpec, name: str, role: Role, *, required: bool) -> ReplicaManager:
        keeper = self._keepers[name] = ReplicaManager(
            pool, order_of(self._spec, pool, name, self._secret), self._keeping, role=role, required=required
        )
        keeper.begin()
        return keeper

    def _in_order(self) -> None:
        """Pools as in the specification, and their workers by number: what is published keeps its order."""
        places = {name: place for place, name in enumerate(self._pools)}
        staff = sorted(self._keepers.values(), key=lambda each: (places[each.pool.name], index_of(each.name)))
        self._keepers = {each.name: each for each in staff}

    def _free_name(self, pool: PoolSpec) -> str:
        """The first that no worker has, those that leave among them."""
        taken = self._keepers
        return next(name for index in range(len(taken) + 1) if (name := _name(pool, index)) not in taken)

    def _leave(self, keeper: ReplicaManager, deadline_s: float, *, waits: bool = False) -> None:
        """`waits`: this controller has not met the worker yet, which may have work."""
        keeper.leave()
        self._bump()
        logger.info("worker %s takes no new work and ends within %.0f s", keeper.name, deadline_s)
        waits = waits or keeper.view.state is WorkerState.DRAINING
        self._leaving[keeper.name] = asyncio.ensure_future(self._see_off(keeper, deadline_s if waits else None))

    async def _see_off(self, keeper: ReplicaManager, deadline_s: float | None) -> None:
        """Stop a worker that leaves once it is empty, or at the deadline: then what is left there fails over."""
        if deadline_s is not None:
            leading = asyncio.ensure_future(self._preflight.lead_out(keeper, self._keepers.values))
            try:
                async with asyncio.timeout(deadline_s):
                    await keeper.emptied(QUIET_S)
            except TimeoutError:
                logger.warning("worker %s is stopped with work left after %.0f s", keeper.name, deadline_s)
            finally:
                leading.cancel()
        try:
            await keeper.end(STOP_GRACE_S)
            logger.info("worker %s has left", keeper.name)
        except Exception:  # its process is the runtime's to end, with the cluster at the latest
            logger.exception("worker %s could not be stopped", keeper.name)
        # Only now: a controller that takes over in between must know that there is something to stop.
        del self._keepers[keeper.name]
        self._leaving.pop(keeper.name, None)
        self._preflight.forget(keeper.name)
        self._bump()

    async def _introduce(self, new: ReplicaManager) -> None:
        await self._preflight.introduce(new, self._keepers.values)


def _name(pool: PoolSpec, index: int) -> str:
    return f"{pool.name}-{index}"
