"""The interfaces between the frontend and the rest of a gateway process: a dispatcher, and an operator for changes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.dispatch.capacity import ServingCapacity
from cluster.events import Event
from cluster.observe.history import Recent, RequestTrace, Window
from cluster.policy.slo_attainment import GatewayAttainment
from cluster.spec import ClusterSpec, Role
from diptych.shapes import Shape, Timings
from diptych.view import Adapter, CachedPrompt, ClusterView, DecisionRecord, ModelView
from workers.request import Request


class ClusterQueries(Protocol):
    """What servers ask about the whole cluster."""

    @property
    def view(self) -> ClusterView:
        """The latest view of the cluster, with statistics."""
        ...

    async def audit(self) -> ClusterView:
        """The view, with each ready worker's check of its block accounting."""
        ...

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        """Time steps of a shape on this idle worker. Errors: `InvalidRequest`, `Rejected`."""
        ...

    def slo_attainment(self) -> GatewayAttainment:
        """The SLO attainment of this gateway's requests."""
        ...

    def recent(self) -> Recent:
        """The traffic of each worker, and the latest events."""
        ...

    def window(self, begin_ns: int, end_ns: int) -> Window:
        """The history of a time window, in nanoseconds of `cluster.observe.ledger.now_ns`."""
        ...

    def oldest_requests(self, count: int) -> Sequence[RequestTrace]:
        """Traces of the oldest `count` running requests."""
        ...

    def view_change(self) -> Awaitable[object]:
        """Done after the next change of membership or state, counted from this call and not from its await."""
        ...


class RequestDispatcher(ClusterQueries, Protocol):
    """The methods that servers use of the dispatcher of one model, whose queries see this model's workers only."""

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None:
        """Run one request; `emit` gets each event immediately. Cancellation ends the request on its workers.

        `deadline_s` counts from now. `arrived_ns` (by `cluster.observe.ledger.now_ns`): when the gateway received the
        request, which is where its ledger begins. Errors: `cluster.events`.
        """
        ...

    def finish(self, request_id: str) -> None:
        """End the request early (stop string): its last event is Completed(STOP). Ignores unknown ids."""
        ...

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The served adapters of this model by name."""
        ...

    @property
    def capacity(self) -> ServingCapacity:
        """What the current workers can hold."""
        ...

    async def warm(self, request: Request, pool: str, ttl_s: float) -> Sequence[CachedPrompt]:
        """Compute and pin (`ttl_s` above 0) a prompt on each worker that prefills. Errors: `InvalidRequest`."""
        ...

    async def unpin(self, request: Request | None, pool: str) -> Sequence[CachedPrompt]:
        """Unpin a prompt, or all, on each worker that prefills. Errors: `InvalidRequest`."""
        ...

    def count_refusal(self, class_name: str, cause: str) -> None:
        """Count a request of this class that the frontend refused. `cause`: one of `slo_attainment.REASONS`."""
        ...


class Operator(Protocol):
    """Changes the cluster: see `cluster.control.controller.Controller`. Errors: `ChangeError`."""

    async def flip(self, worker: str, role: Role, revision: int) -> int: ...
    async def drain(self, worker: str, revision: int, deadline_s: float) -> int: ...
    async def scale(self, pool: str, replicas: int, revision: int) -> int: ...
    async def load_adapter(self, adapter: Adapter, revision: int) -> int: ...
    async def unload_adapter(self, name: str, revision: int) -> int: ...
    async def decisions(self) -> tuple[DecisionRecord, ...]: ...
    async def decision_counts(self) -> tuple[tuple[str, str, int], ...] | None: ...


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """What a server gets from its gateway process, for one model. Without an operator, changes of the cluster are
    refused.

    `spec`: of the pools that serve this model. The context of the first model has those of the others, and `whole`,
    which answers for all.
    """

    name: str
    spec: ClusterSpec
    model: ModelView
    dispatcher: RequestDispatcher
    operator: Operator | None = None
    others: tuple["GatewayContext", ...] = ()
    whole: ClusterQueries | None = None

    @property
    def models(self) -> tuple["GatewayContext", ...]:
        """The context of each model."""
        return self, *self.others

    @property
    def queries(self) -> ClusterQueries:
        """About the whole cluster."""
        return self.whole or self.dispatcher


class Server(Protocol):
    """A server in front of a dispatcher."""

    async def open(self) -> str:
        """Listen. Returns the endpoint "host:port". Raises OSError if the port is in use."""
        ...

    @property
    def http_url(self) -> str:
        """The URL of the open HTTP server; empty without one."""
        ...

    async def close(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` to finish, then cancel them."""
        ...


ServerFactory = Callable[[GatewayContext], Server]
