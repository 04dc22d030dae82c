"""The dispatcher of one model in a gateway: runs requests, and answers the frontend's queries about them.

Composes worker discovery, policy, admission queue, request runner and observers. Knows no text and no wire format.
"""

import asyncio
import itertools
import uuid
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from cluster.control.client import ControllerClient
from cluster.dispatch.admission_queue import AdmissionQueue
from cluster.dispatch.capacity import ServingCapacity
from cluster.dispatch.discovery import RECONNECT_S, WorkerDiscovery
from cluster.dispatch.migration_loop import MigrationLoop
from cluster.dispatch.request_runner import RequestRunner
from cluster.dispatch.worker_client import WorkerClient
from cluster.events import Event, Rejected
from cluster.observe.history import History
from cluster.observe.ledger import now_ns
from cluster.observe.load_reporter import LoadReporter
from cluster.observe.request_metrics import RequestMetrics
from cluster.observe.request_observer import RequestLog, RequestObserver, RequestObservers, SLOObserver
from cluster.policy.admission.classes import Classes
from cluster.policy.policy import open_policy
from cluster.policy.slo_attainment import GatewayAttainment, SLOScores
from cluster.runtime.interface import WorkerStub
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import ClusterSpec, Role
from diptych.clock import now_s
from diptych.history import Recent, RequestTrace, Window
from diptych.shapes import Shape, Timings
from diptych.view import Adapter, CachedPrompt, ClusterView, ModelView
from workers.errors import InvalidRequest, Overloaded, WorkerClosed, WorkerError
from workers.request import Request, check_shape

WARM_TIMEOUT_S = 120.0


class Dispatcher:
    """Owned by one gateway, which has one for each model. `start` before use, `close` after.

    `observers`: further observers of requests.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        model: ModelView,
        controller: ControllerClient,
        name: str = "gateway",
        observers: Iterable[RequestObserver] = (),
    ) -> None:
        self._spec = spec
        self._process = f"{name}-{uuid.uuid4().hex[:8]}"  # a restarted gateway keeps its name
        self._numbers = itertools.count(1)
        self._policy = open_policy(spec, seed=zlib.crc32(name.encode()))  # gateways must break ties differently
        self._classes = Classes(spec.gateway)
        self._slo_scores = SLOScores()
        self._metrics = RequestMetrics(spec.gateway.classes, spec.transfer.backends)
        self.history = History(spec.gateway.trace_requests, spec.gateway.trace_s, now_ns)
        self.load_reporter = LoadReporter(name, spec.gateway.slo, lambda: asyncio.get_running_loop().time(), model.name)
        own = SLOObserver(self._slo_scores), self._metrics, self.history, self.load_reporter, RequestLog(name)
        self._observer = RequestObservers((*own, *observers))
        caches = self._policy.index if self._policy.uses_prefix_index else None
        self.discovery = WorkerDiscovery(spec, model, controller, name, caches, self.history)
        self._admission_queue = AdmissionQueue(
            spec.gateway, self._policy, spec.health.heartbeat_s, self.discovery.change
        )
        self._runner = RequestRunner(
            spec,
            name,
            policy=self._policy,
            discovery=self.discovery,
            admission_queue=self._admission_queue,
            observer=self._observer,
        )
        self._migrations = MigrationLoop(
            self._policy.migrations,
            self._policy.requeue,
            routing_view=self.discovery.routing_view,
            change=self.discovery.change,
            contexts=self._runner.decode_contexts,
            move=self._runner.move_attempt,
            replace=self._runner.replace_attempt,
        )

    async def start(self) -> None:
        """Connect to the workers, and follow the membership from now on."""
        await self.discovery.start()
        self._migrations.start(self.discovery.failures)

    async def close(self) -> None:
        """End everything that still runs."""
        await self._runner.close()
        await self._migrations.close()
        await self._admission_queue.close()
        await self.discovery.close()

    # ---- requests --------------------------------------------------------------------------------------------

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None:
        """Run one request, and `emit` each event: Accepted, Delta..., Completed. Cancellation ends it on every worker.

        `deadline_s` counts from now. `arrived_ns` (by `cluster.observe.ledger.now_ns`): the begin of the ledger, which
        then includes the gateway's work before this call. Errors: `cluster.events`, and `InvalidRequest` for an unknown
        class or tenant.
        """
        request = replace(self._classes.resolved(request), origin=f"{self._process}.{next(self._numbers)}")
        await self._runner.run(request, emit, deadline_s, now_ns() if arrived_ns is None else arrived_ns)

    def finish(self, request_id: str) -> None:
        """End the request early (stop string): its next event is Completed(STOP). Ignores unknown ids."""
        self._runner.finish(request_id)

    async def move(self, request_id: str, worker: str, timeout_s: float | None = None) -> bool:
        """Migrate this request's running decode to `worker`. False: it stays where it is.

        `timeout_s` None: the time limit of a KV read. It does not apply to the last step.
        """
        return await self._runner.move(request_id, worker, timeout_s)

    # ---- the frontend's queries --------------------------------------------------------------------------------

    @property
    def view(self) -> ClusterView:
        """The membership with the latest statistics. A lost worker is shown as dead."""
        return self.discovery.view()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The served adapters by name."""
        return self.discovery.adapters

    @property
    def capacity(self) -> ServingCapacity:
        """What the current workers can hold."""
        return self.discovery.capacity()

    def view_change(self) -> Awaitable[object]:
        """Done after the next change, from this call on, of the membership or a worker's state (not of statistics)."""
        return self.discovery.change()

    async def audit(self) -> ClusterView:
        """The view, with each ready worker's check of its block accounting."""
        return await self.discovery.audit()

    def slo_attainment(self) -> GatewayAttainment:
        """SLO attainment of this gateway's requests, with migrations and role changes."""
        self.discovery.catch_up(with_tokens=True)
        return replace(
            self._slo_scores.attainment(self._policy.lengths.calibration()),
            moves=self._migrations.counts(),
            moved_bytes=self._runner.moved_bytes,
            role_changes=self.discovery.role_changes(),
            queued=len(self._admission_queue.queue),
            fallbacks=self._runner.fallbacks,
            dropped_hashes=self._policy.index.dropped,
            totals=self._metrics.snapshot(),
        )

    def count_refusal(self, class_name: str, cause: str) -> None:
        """Count a request that the frontend refused. `cause`: one of `slo_attainment.REASONS`."""
        self._observer.on_rejected(class_name, cause)

    def recent(self) -> Recent:
        """Traffic of each worker since this gateway started, and the latest events."""
        self.discovery.catch_up(with_tokens=True)
        return self.history.recent(worker.name for worker in self.discovery.membership.view.workers)

    def window(self, begin_ns: int, end_ns: int) -> Window:
        """The history of a time window (by `cluster.observe.ledger.now_ns`), including running requests."""
        return self.history.window(begin_ns, end_ns, self._runner.traces())

    def oldest_requests(self, count: int) -> list[RequestTrace]:
        """Traces of the oldest `count` running requests."""
        return list(itertools.islice(self._runner.traces(), count))

    async def warm(self, request: Request, pool: str, ttl_s: float) -> tuple[CachedPrompt, ...]:
        """Compute a prompt on all workers that prefill, and pin it for `ttl_s` (0: do not). See `Worker.warm`."""
        clients = self.discovery.clients.values()
        return await _on_each(clients, pool, lambda worker: worker.warm(request, ttl_s, WARM_TIMEOUT_S))

    async def unpin(self, request: Request | None, pool: str) -> tuple[CachedPrompt, ...]:
        """Unpin a prompt, or all (None), on all workers that prefill. Errors of both: `InvalidRequest`."""
        return await _on_each(self.discovery.clients.values(), pool, lambda worker: worker.unpin(request))

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        """Time steps of a shape on this idle worker. Raises `InvalidRequest`, or `Rejected` if it is busy or lost."""
        client = self.discovery.clients.get(worker)
        if client is None or client.lost is not None:
            names = ", ".join(self.discovery.clients) or "none"
            raise InvalidRequest("worker", f"{worker!r} is not ready here; ready are: {names}")
        (pool,) = (pool for pool in self._spec.pools if pool.name == client.view.pool)
        check_shape(pool.engine, shape, repeats)
        begun_s = now_s()
        try:
            timings = await client.handle.measure(shape, repeats)
        except Overloaded as error:
            raise Rejected(f"{worker}: {error}", error.retry_after_s) from None
        except (WorkerGone, WorkerClosed) as error:
            raise Rejected(f"{worker} is gone: {error}", RECONNECT_S) from None
        return replace(timings, call_s=now_s() - begun_s - timings.elapsed_s)


async def _on_each(
    clients: Collection[WorkerClient], pool: str, call: Callable[[WorkerStub], Awaitable[int]]
) -> tuple[CachedPrompt, ...]:
    """Call all ready workers that prefill, of this pool or of all (""), at the same time; the calls return tokens.

    Raises `InvalidRequest` if there is no such worker.
    """
    chosen = [
        client
        for client in clients
        if client.lost is None and client.view.role is not Role.DECODE and pool in ("", client.view.pool)
    ]
    if not chosen:
        where = f"pool {pool!r}" if pool else "this cluster"
        raise InvalidRequest("pool", f"{where} has no ready worker that prefills")
    return tuple(await asyncio.gather(*(_one(client, call) for client in chosen)))


async def _one(client: WorkerClient, call: Callable[[WorkerStub], Awaitable[int]]) -> CachedPrompt:
    try:
        return CachedPrompt(client.name, await call(client.handle))
    except (WorkerError, WorkerGone) as error:
        return CachedPrompt(client.name, problem=str(error))
