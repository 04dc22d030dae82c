"""The dispatcher of one gateway: takes requests, has each one run, and answers what the frontend asks about them.

It puts the parts together: worker discovery, policy, admission queue, placement, and one observer for all that watches.
Knows no text and no wire.
"""

import asyncio
import itertools
import uuid
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import replace

from cluster.dispatch.admission_queue import AdmissionQueue
from cluster.dispatch.attempt import Phase
from cluster.dispatch.discovery import RECONNECT_S, WatchMembers, WorkerDiscovery
from cluster.dispatch.migration_loop import MigrationLoop
from cluster.dispatch.placement import Placer
from cluster.dispatch.request_runner import RequestRunner
from cluster.dispatch.request_state import RequestState
from cluster.events import Event, Rejected, Unservable
from cluster.observe.history import History, Recent, RequestTrace, Window
from cluster.observe.ledger import Stopwatch, now_ns
from cluster.observe.load_reporter import LoadReporter
from cluster.observe.request_log import RequestLog
from cluster.observe.request_metrics import RequestMetrics
from cluster.observe.request_observer import RequestObserver, RequestObservers, SLOObserver
from cluster.observe.request_timing import RequestTiming
from cluster.policy.admission.classes import Classes
from cluster.policy.policy import open_policy
from cluster.policy.routing.prefix_index import Guesses
from cluster.policy.slo_attainment import GatewayAttainment, SLOScores
from cluster.runtime.errors import WorkerGone
from cluster.spec import ClusterSpec
from diptych.shapes import Shape, Timings
from diptych.view import ClusterView, ModelView
from workers.errors import InvalidRequest, Overloaded, WorkerClosed
from workers.request import Request, check_shape


class Dispatcher:
    """Owned by one gateway. `start` before use, `close` after. `observers` get each request's events, too."""

    def __init__(
        self,
        spec: ClusterSpec,
        model: ModelView,
        watch_members: WatchMembers,
        name: str = "gateway",
        observers: Iterable[RequestObserver] = (),
    ) -> None:
        self._spec = spec
        self._process = f"{name}-{uuid.uuid4().hex[:8]}"  # a gateway that is started again keeps its name
        self._numbers = itertools.count(1)
        self._policy = open_policy(spec, seed=zlib.crc32(name.encode()))  # gateways do not all draw the same
        self._running: dict[str, RequestState] = {}
        self._classes = Classes(spec.gateway)
        self._slo_scores = SLOScores()
        self._metrics = RequestMetrics(spec.gateway.classes, spec.transfer.backends)
        self.history = History(spec.gateway.trace_requests, spec.gateway.trace_s, now_ns)
        self.load_reporter = LoadReporter(name, spec.gateway.slo, lambda: asyncio.get_running_loop().time())
        own = SLOObserver(self._slo_scores), self._metrics, self.history, self.load_reporter, RequestLog(name)
        self._observer = RequestObservers((*own, *observers))
        caches = self._policy.index if self._policy.wants_caches else None
        self.discovery = WorkerDiscovery(spec, model, watch_members, name, caches, self.history)
        self._admission_queue = AdmissionQueue(
            spec.gateway, self._policy, spec.health.heartbeat_s, self.discovery.change
        )
        self._placer = Placer(spec, self._policy, self._admission_queue, self.discovery, self._running)
        self._runner = RequestRunner(
            spec,
            name,
            policy=self._policy,
            placer=self._placer,
            discovery=self.discovery,
            admission_queue=self._admission_queue,
            observer=self._observer,
        )
        self._migrations = MigrationLoop(
            self._policy.mover,
            self._policy.requeue,
            picture=self.discovery.picture,
            change=self.discovery.change,
            contexts=self._contexts,
            move=self._move_attempt,
            replace=self._replace_attempt,
        )

    async def start(self) -> None:
        """Learn the members, and follow them from now on."""
        await self.discovery.start()
        self._migrations.start(self.discovery.failures)

    async def close(self) -> None:
        """End everything still running."""
        await self._runner.close()
        await self._migrations.close()
        await self._admission_queue.close()
        await self.discovery.close()

    # ---- requests --------------------------------------------------------------------------------------------

    async def generate(
        self, request: Request, *, deadline_s: float | None = None, arrived_ns: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run one request: Accepted, Delta..., Completed. Closing the iterator ends it on every worker.

        `arrived_ns` (of `cluster.observe.ledger.now_ns`) lets the ledger count what the gateway did before.
        Errors: `cluster.events`.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()  # bounded by the request's own tokens
        running = self.run(request, events.put_nowait, deadline_s=deadline_s, arrived_ns=arrived_ns)
        task = asyncio.ensure_future(running)
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None:
        """Like `generate`, for a caller who takes each event at the moment it happens.

        Raises `InvalidRequest`, too, for a class or a tenant that the specification does not have.
        """
        if request.id in self._running:
            raise Unservable(f"request id {request.id!r} is already running here")
        request = replace(self._classes.resolved(request), origin=f"{self._process}.{next(self._numbers)}")
        arrived_ns = now_ns() if arrived_ns is None else arrived_ns
        watch, timing = Stopwatch(now_ns, arrived_ns), RequestTiming(arrived_ns / 1e9)
        state = self._running[request.id] = RequestState(request, watch, emit, timing)
        try:
            await self._runner.run(state, deadline_s)
        finally:
            del self._running[request.id]

    def finish(self, request_id: str) -> None:
        """The caller has all it wants (a stop string): the next event is Completed(STOP). Unknown ids are ignored."""
        state = self._running.get(request_id)
        if state is not None:
            self._runner.finish(state)

    async def move(self, request_id: str, worker: str, timeout_s: float | None = None) -> bool:
        """Have another worker go on with this request's decode, while it goes on; False when it stays where it is.

        `timeout_s` None: as long as a read may take. Its last step ends with the worker's answer.
        """
        state = self._running.get(request_id)
        return state is not None and await self._runner.move(state, worker, timeout_s)

    # ---- for the migration loop --------------------------------------------------------------------------------

    def _find(self, key: str) -> RequestState | None:
        """Whose attempt has this key now."""
        state = self._running.get(key.partition("/")[0])
        return state if state is not None and state.request.key == key else None

    async def _move_attempt(self, key: str, worker: str) -> bool:
        state = self._find(key)
        return state is not None and await self._runner.move(state, worker, None)

    def _replace_attempt(self, key: str) -> bool:
        state = self._find(key)
        return state is not None and self._runner.replace(state)

    def _contexts(self) -> dict[str, int]:
        """The tokens so far of each attempt that decodes."""
        return {
            state.request.key: len(state.request.prompt) + len(state.sent)
            for state in self._running.values()
            if state.attempt is not None and state.attempt.phase is Phase.DECODE
        }

    # ---- what the frontend asks --------------------------------------------------------------------------------

    @property
    def view(self) -> ClusterView:
        """Membership as published, statistics as last received; a lost worker counts as dead."""
        return self.discovery.view()

    def view_change(self) -> Awaitable[object]:
        """Done after the next change of membership or state; statistics alone are none."""
        return self.discovery.change()

    async def audit(self) -> ClusterView:
        """The view, with every ready worker's proof that its blocks are accounted for."""
        return await self.discovery.audit()

    def slo_attainment(self) -> GatewayAttainment:
        """How this gateway's requests met their SLOs, and what was moved for them."""
        return replace(
            self._slo_scores.attainment(self._policy.lengths.calibration()),
            moves=self._migrations.counts(),
            moved_bytes=self._runner.moved_bytes,
            role_changes=self.discovery.role_changes(),
            queued=len(self._admission_queue.queue),
            uncovered=tuple((role.value, count) for role, count in self._placer.uncovered.items()),
            tally=self._metrics.snapshot(),
        )

    def turned_away(self, class_name: str, cause: str) -> None:
        """A request never came here: the frontend refused it."""
        self._observer.on_turned_away(class_name, cause)

    def recent(self) -> Recent:
        """What went through each worker since this gateway began, and what happened lately."""
        return self.history.recent(member.view.name for member in self.discovery.membership.members)

    def remembered(self, begin_ns: int, end_ns: int) -> Window:
        """What is still known of a stretch of time, of `cluster.observe.ledger.now_ns`; requests under way too."""
        return self.history.window(begin_ns, end_ns, [state.trace() for state in self._running.values()])

    def under_way(self, most: int) -> list[RequestTrace]:
        """How the oldest `most` requests under way go."""
        return [state.trace() for state in itertools.islice(self._running.values(), most)]

    @property
    def guesses(self) -> Guesses:
        """How right this gateway was about what workers had cached."""
        return self._policy.index.guesses

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        """Have this idle worker time steps of a shape. Errors: `InvalidRequest`; `Rejected`: it has work or is gone."""
        client = self.discovery.clients.get(worker)
        if client is None or client.lost is not None:
            names = ", ".join(self.discovery.clients) or "none"
            raise InvalidRequest("worker", f"{worker!r} is not ready here; ready are: {names}")
        (pool,) = (pool for pool in self._spec.pools if pool.name == client.view.pool)
        check_shape(pool.engine, shape, repeats)
        clock = asyncio.get_running_loop()
        begun_s = clock.time()
        try:
            timings = await client.handle.measure(shape, repeats)
        except Overloaded as error:
            raise Rejected(f"{worker}: {error}", error.retry_after_s) from None
        except (WorkerGone, WorkerClosed) as error:
            raise Rejected(f"{worker} is gone: {error}", RECONNECT_S) from None
        return replace(timings, call_s=clock.time() - begun_s - timings.elapsed_s)
