"""The interfaces between the frontend and the rest of a gateway process: a dispatcher, and an operator for changes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.dispatch.capacity import ServingCapacity
from cluster.events import Event
from cluster.policy.slo_attainment import GatewayAttainment
from cluster.spec import ClusterSpec, Role
from diptych.history import Recent, RequestTrace, Window
from diptych.shapes import Shape, Timings
from diptych.view import Adapter, CachedPrompt, ClusterView, DecisionRecord, ModelView
from workers.request import Request


class ClusterQueries(Protocol):
    """What servers ask about the whole cluster. `cluster.dispatch.dispatcher.Dispatcher` documents the methods."""

    @property
    def view(self) -> ClusterView: ...
    async def audit(self) -> ClusterView: ...
    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings: ...
    def slo_attainment(self) -> GatewayAttainment: ...
    def recent(self) -> Recent: ...
    def window(self, begin_ns: int, end_ns: int) -> Window: ...
    def oldest_requests(self, count: int) -> Sequence[RequestTrace]: ...
    def view_change(self) -> Awaitable[object]: ...


class RequestDispatcher(ClusterQueries, Protocol):
    """The methods that servers use of the dispatcher of one model, whose queries see this model's workers only."""

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None: ...
    def finish(self, request_id: str) -> None: ...
    @property
    def adapters(self) -> Mapping[str, Adapter]: ...
    @property
    def capacity(self) -> ServingCapacity: ...
    async def warm(self, request: Request, pool: str, ttl_s: float) -> Sequence[CachedPrompt]: ...
    async def unpin(self, request: Request | None, pool: str) -> Sequence[CachedPrompt]: ...
    def count_refusal(self, class_name: str, cause: str) -> None: ...


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
