"""Worker discovery of one gateway: follows the membership, keeps a client for every ready worker, and combines both
into the cluster view.

Reconnects to lost workers, and keeps the last membership while the controller is away. Knows no request and no policy.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial

from msgspec import structs

from cluster.control.client import ControllerClient
from cluster.control.membership import NO_MEMBERSHIP, Membership
from cluster.control.replicas import CRASH_LOOP, REMOVED
from cluster.control.supervision import Failures, supervised
from cluster.dispatch.capacity import ServingCapacity, serving_capacity, sized
from cluster.dispatch.kv_event_reader import KVEventReader
from cluster.dispatch.worker_client import WorkerClient
from cluster.observe.history import History
from cluster.policy.routing.lending import Lending
from cluster.policy.routing.prefix_index import PrefixIndex
from cluster.policy.routing.router import SentWork
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import ClusterSpec, Role
from diptych.background_tasks import BackgroundTasks
from diptych.view import Adapter, ClusterView, ModelView, TaskFailures, WorkerState, WorkerView
from workers.errors import WorkerError
from workers.request import DeferredSource

logger = logging.getLogger(__name__)

WATCH_S = 10.0
RECONNECT_S = 1.0


class WorkerDiscovery:
    """Owned by a Dispatcher. `start` before use, `close` after. Sends cache events to `caches`, and role changes and
    lost workers to `history`.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        model: ModelView,
        controller: ControllerClient,
        name: str,
        caches: PrefixIndex | None,
        history: History,
    ) -> None:
        self._spec = spec
        self._pools = {pool.name for pool in spec.pools}
        self._model = model
        self._controller = controller
        self._name = name
        self._caches = caches
        self._history = history
        self.failures = Failures(self._forget_routing_view)
        self._membership = NO_MEMBERSHIP
        self._workers: dict[str, WorkerView] = {}  # of the membership, by name
        self.adapters: dict[str, Adapter] = {}  # of the membership, by name
        self._seen: dict[str, WorkerView] = {}  # the routing view's workers
        self._sent: dict[str, SentWork] = {}
        self._deferred: dict[str, DeferredSource] = {}  # by worker, those that `catch_up` asks
        self._stale: set[str] = set()  # workers that changed since the last routing view
        self._routing_view: ClusterView | None = None  # None: other parts changed
        self._lending = Lending(spec)
        self._capacity: ServingCapacity | None = None  # of the membership; None: not computed yet
        self._changed = asyncio.Event()
        self._background = BackgroundTasks()
        self._following: list[asyncio.Task[None]] = []
        self.clients: dict[str, WorkerClient] = {}
        self._heard_s: dict[str, float] = {}  # of members without a client: when its last one heard from them
        self._role_changes: Counter[tuple[str, str]] = Counter()

    async def start(self) -> None:
        """Connect to the workers, and follow the membership from now on."""
        self.take(await self._controller.members(0, WATCH_S))
        for task, work in (("following the members", self._follow), ("reconnecting to lost workers", self._reconnect)):
            self._following.append(asyncio.ensure_future(supervised(task, work, self.failures)))
        while any(not client.has_answered and client.lost is None for client in self.clients.values()):
            await self._changed.wait()  # each client gets an answer or is lost within its timeout

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*(client.close() for client in self.clients.values()), *self._background)

    def change(self) -> Awaitable[object]:
        """Done after the next change of the membership or of a worker's state; statistics do not count."""
        return self._changed.wait()

    def role_changes(self) -> tuple[tuple[str, str, int], ...]:
        """Role changes since this gateway started: (old role, new role, count)."""
        return tuple((before, after, count) for (before, after), count in sorted(self._role_changes.items()))

    @property
    def membership(self) -> Membership:
        return self._membership

    # ---- the view --------------------------------------------------------------------------------------------

    def routing_view(self) -> ClusterView:
        """The membership with the latest statistics, without ages. Unchanged parts are the same objects."""
        self.catch_up()
        if self._routing_view is None or self._stale:  # called for each request
            for name in self._stale & self._seen.keys():
                client, view = self.clients.get(name), self._workers[name]
                self._seen[name] = view if client is None else client.seen(view)
            self._stale.clear()
            workers, failures = tuple(self._seen.values()), self._all_failures()
            self._routing_view = replace(
                self._membership.view, name=self._spec.name, model=self._model, workers=workers, failures=failures
            )
        return self._routing_view

    def _forget_routing_view(self) -> None:
        self._routing_view = None

    def _all_failures(self) -> tuple[TaskFailures, ...]:
        own = self.failures.counts()
        return (*self._membership.view.failures, *(TaskFailures(self._name, task, count) for task, count in own))

    def view(self) -> ClusterView:
        """The routing view with ages. A lost worker is shown as dead."""
        routing_view, now_s = self.routing_view(), asyncio.get_running_loop().time()
        return replace(routing_view, workers=tuple(self._aged(worker, now_s) for worker in routing_view.workers))

    def _aged(self, worker: WorkerView, now_s: float) -> WorkerView:
        client = self.clients.get(worker.name)
        if client is None:
            return structs.replace(worker, age_s=now_s - self._heard_s.get(worker.name, now_s))
        if client.view.incarnation != worker.incarnation:
            return worker
        return structs.replace(worker, age_s=now_s - client.last_outputs_s)

    def capacity(self) -> ServingCapacity:
        """What the current members can hold."""
        if self._capacity is None:  # several reads for each request
            self._capacity = serving_capacity(self._spec.pools, self.sized(), self.together())
        return self._capacity

    def together(self) -> int:
        """Tokens of the longest sequence that several workers can hold together."""
        return min(self._lending.longest(self.sized()), self._model.context_length)

    def sized(self) -> tuple[WorkerView, ...]:
        """The members with their capacity, as far as it is known."""
        return sized(self._workers.values())

    def has_ready(self, *roles: Role) -> bool:
        """Whether a connected worker of one of these roles is ready."""
        return any(
            worker.role in roles
            and worker.state is WorkerState.READY
            and (client := self.clients.get(worker.name)) is not None
            and client.lost is None
            for worker in self._workers.values()
        )

    def sent(self) -> dict[str, SentWork]:
        """The work sent to each worker since the statistics in the latest routing view."""
        return self._sent.copy()

    def catch_up(self, *, with_tokens: bool = False) -> None:
        """Take the statistics, and perhaps the tokens, that workers in this process have not reported yet."""
        for source in tuple(self._deferred.values()):
            source.catch_up(with_tokens)

    async def audit(self) -> ClusterView:
        """The view, with each ready worker's check of its block accounting."""
        view = self.view()
        clients = [self.clients.get(worker.name) for worker in view.workers]
        audits = await asyncio.gather(*(_audit(client) for client in clients))
        return replace(
            view, workers=tuple(structs.replace(w, audit=audit) for w, audit in zip(view.workers, audits, strict=True))
        )

    def report_unlinked(self, owner: str, reader: str) -> None:
        """Tell the controller that a worker could not connect to an owner of KV. Does not wait."""
        self._background.start(self._report_unlinked(owner, reader))

    async def _report_unlinked(self, owner: str, reader: str) -> None:
        try:
            await self._controller.unlinked(owner, reader)
        except WorkerGone as error:
            logger.warning("could not report that no KV moves from %s to %s: %s", owner, reader, error)

    # ---- following -------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Poll for the next membership. While the controller is away, the last one stays valid."""
        try:
            self.take(await self._controller.members(self._membership.revision, WATCH_S))
        except WorkerGone as error:
            logger.warning("the controller does not answer (%s); keeping the last membership", error)
            await asyncio.sleep(RECONNECT_S)

    def take(self, membership: Membership) -> None:
        """Follow a membership. The views of workers that did not change are the same objects."""
        cluster_view = membership.view.of_pools(self._pools)  # other pools serve other models
        self._membership = structs.replace(membership, view=cluster_view)
        self.adapters = {each.name: each for each in cluster_view.adapters}
        before = self._workers
        self._workers = workers = {worker.name: worker for worker in cluster_view.workers}
        self._capacity = None
        changed = [worker for name, worker in workers.items() if before.get(name) is not worker]
        self._record_changes(before, changed)
        left = before.keys() - workers.keys()
        for name in (*left, *(worker.name for worker in changed)):
            client, view = self.clients.get(name), workers.get(name)
            if client is not None and _departed(client, view):
                if client.lost is None:
                    client.give_up(_reason(view))
                self._background.start(client.close())
                del self.clients[name]
                self._sent.pop(name, None)
                self._heard_s[name] = client.last_outputs_s
                if self._caches is not None:
                    self._caches.forget(name)
            is_ready = view is not None and view.state is WorkerState.READY and membership.handles[name] is not None
            if view is not None and is_ready and name not in self.clients:
                self.clients[name] = self._connect(view)
        self._heard_s = {name: at_s for name, at_s in self._heard_s.items() if name in workers}
        self._seen = {name: self._seen.get(name, worker) for name, worker in workers.items()}
        self._stale.update(worker.name for worker in changed)
        self._routing_view = None
        self._notify()

    def _record_changes(self, before: dict[str, WorkerView], changed: list[WorkerView]) -> None:
        for now in changed:
            if now.name not in before:
                continue
            old = before[now.name]
            if old.role is not now.role:
                self._role_changes[old.role.value, now.role.value] += 1
                self._history.add_event("flip", now.name, f"{old.role.value} -> {now.role.value}")
            if old.failures < CRASH_LOOP <= now.failures:
                self._history.add_event("crash loop", now.name, now.detail)
            was_ready = old.state is WorkerState.READY and old.incarnation == now.incarnation
            if now.state is WorkerState.READY and now.restarts and not was_ready:
                self._history.add_event("back", now.name, now.detail)

    def _connect(self, view: WorkerView) -> WorkerClient:
        """A new client with a new subscriber name. The worker drops an older client's mailbox after a timeout."""
        self._sent.pop(view.name, None)
        worker_handle = self._membership.handles[view.name]
        assert worker_handle is not None, "only ready workers have a client"
        handle = worker_handle.at(view.incarnation)
        reader: KVEventReader | None = None
        if self._caches is not None:
            take = partial(self._caches.take, view.name, view.incarnation, server=view.remote_store)
            reader = KVEventReader(handle, take, self._spec.gateway.cache_events_interval_s)
        client = WorkerClient(
            view,
            handle,
            subscriber=f"{self._name}-{uuid.uuid4().hex[:12]}",
            silence_s=self._spec.health.dead_after_s,
            sent=self._sent,
            deferred=self._deferred,
            touched=partial(self._stale.add, view.name),
            changed=self._notify,
            cache=reader,
            kv_dtype=next((pool.engine.dtype for pool in self._spec.pools if pool.name == view.pool), ""),
        )
        client.ended.add_done_callback(lambda _: self._on_client_ended(client))
        return client

    def _on_client_ended(self, client: WorkerClient) -> None:
        reason = client.lost or ""
        self._history.add_event("left" if reason == REMOVED else "lost", client.name, reason)

    async def _reconnect(self) -> None:
        """Make a new client for each lost worker that the controller still sees as ready, every `RECONNECT_S`."""
        await asyncio.sleep(RECONNECT_S)
        for client in [each for each in self.clients.values() if each.lost is not None]:
            view = self._workers[client.name]
            if view.state is WorkerState.READY and view.incarnation == client.view.incarnation:
                self._background.start(client.close())
                self.clients[view.name] = self._connect(view)
                self._stale.add(view.name)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _departed(client: WorkerClient, view: WorkerView | None) -> bool:
    """Whether the membership shows that this client's worker is gone.

    STARTING does not: a restarted controller publishes it for running workers until it has reconnected to them.
    """
    if view is None or view.state is WorkerState.DEAD:
        return True
    return view.state is WorkerState.READY and view.incarnation != client.view.incarnation


def _reason(view: WorkerView | None) -> str:
    """Why this worker is gone, according to the membership."""
    if view is None or view.state is not WorkerState.DEAD:
        return REMOVED if view is None else "it was restarted"
    return view.detail or "it died"


async def _audit(client: WorkerClient | None) -> str:
    if client is None or client.lost is not None:
        return "not ready"
    try:
        await client.handle.check()
    except AssertionError as error:
        return f"blocks do not balance: {error}"
    except (WorkerGone, WorkerError) as error:
        return f"{type(error).__name__}: {error}"
    return "clean"
