"""What the frontend needs of the rest of a gateway process: a dispatcher, and an operator that changes the cluster."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.events import Event
from cluster.observe.history import Recent, RequestTrace, Window
from cluster.policy.slo_attainment import GatewayAttainment
from cluster.spec import ClusterSpec, Role
from diptych.shapes import Shape, Timings
from diptych.view import ClusterView, DecisionRecord, ModelView
from workers.request import Request


class RequestDispatcher(Protocol):
    """What a server needs of the dispatcher."""

    async def run(
        self,
        request: Request,
        emit: Callable[[Event], None],
        *,
        deadline_s: float | None = None,
        arrived_ns: int | None = None,
    ) -> None:
        """Run one request; `emit` gets each event at the moment it happens. Cancelling cancels it on both workers.

        `deadline_s` counts from now. `arrived_ns` (of `cluster.observe.ledger.now_ns`) is when the gateway took the
        request: the ledger begins there. Errors: `cluster.events`.
        """
        ...

    def finish(self, request_id: str) -> None:
        """The caller has all it wants (a stop string): the last event is Completed(STOP).

        Does nothing when the request is not running.
        """
        ...

    @property
    def view(self) -> ClusterView:
        """The latest picture of the cluster, statistics included."""
        ...

    async def audit(self) -> ClusterView:
        """The view, with every ready worker's proof that its blocks are accounted for."""
        ...

    async def measure(self, worker: str, shape: Shape, repeats: int) -> Timings:
        """Have this idle worker time steps of a shape. Errors: `InvalidRequest`, `Rejected`."""
        ...

    def slo_attainment(self) -> GatewayAttainment:
        """How this gateway's requests met their SLOs."""
        ...

    def count_refusal(self, class_name: str, cause: str) -> None:
        """The frontend refused a request of this class, for one of `cluster.policy.slo_attainment.REASONS`."""
        ...

    def recent(self) -> Recent:
        """What went through each worker, and what happened lately."""
        ...

    def window(self, begin_ns: int, end_ns: int) -> Window:
        """What is known of a stretch of time, of `cluster.observe.ledger.now_ns`."""
        ...

    def oldest_requests(self, most: int) -> Sequence[RequestTrace]:
        """How the oldest `most` requests under way go."""
        ...

    def view_change(self) -> Awaitable[object]:
        """Done after the first change of membership or state that follows this call (the call, not its await)."""
        ...


class Operator(Protocol):
    """Changes the cluster: see `cluster.control.controller.Controller`. Errors: `ChangeError`."""

    async def flip(self, worker: str, role: Role, revision: int) -> int: ...
    async def drain(self, worker: str, revision: int, deadline_s: float) -> int: ...
    async def scale(self, pool: str, replicas: int, revision: int) -> int: ...
    async def decisions(self) -> tuple[DecisionRecord, ...]: ...
    async def decision_counts(self) -> tuple[tuple[str, str, int], ...] | None: ...


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """What one gateway process hands to its server. Without an operator nothing can be changed through it."""

    name: str
    spec: ClusterSpec
    model: ModelView
    dispatcher: RequestDispatcher
    operator: Operator | None = None


class Server(Protocol):
    """A server in front of a dispatcher."""

    async def open(self) -> str:
        """Listen; answer the endpoint "host:port". A port in use is an OSError that says so."""
        ...

    @property
    def http_url(self) -> str:
        """Where HTTP is answered too, once open; empty without it. Asked only where the spec has a port for it."""
        ...

    async def close(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end for `grace_s`, then cut them."""
        ...


ServerFactory = Callable[[GatewayContext], Server]
