"""The interfaces between the frontend and the rest of a gateway process: a dispatcher, and an operator for changes.
And what the `model` of a request means, in every API.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.dispatch.capacity import ServingCapacity
from cluster.events import ClusterError, Event
from cluster.policy.slo_attainment import GatewayAttainment
from cluster.spec import ClusterSpec, Role
from diptych.history import Recent, RequestTrace, Window
from diptych.shapes import Shape, Timings
from diptych.view import Adapter, CachedPrompt, ClusterView, DecisionRecord, ModelView
from workers.request import Request

MAX_NAME_CHARS = 128  # of a name that an error repeats
MAX_NAMES = 16  # that an error lists


class UnknownModel(ClusterError):
    """The requested model is not served here."""


def adapter_named(model: str, adapters: Mapping[str, Adapter]) -> Adapter | None:
    """The adapter that a request names as its model: ADAPTER or MODEL:ADAPTER. None: it names none of these."""
    base, colon, name = model.rpartition(":")
    found = adapters.get(name)
    return found if found is not None and base == (found.model if colon else "") else None


def resolve(model: str, served: Sequence[str], adapters: Collection[str] = ()) -> str:
    """The served model that a request names. Empty: the only one. `served`: at least one name.

    `adapters`: names that it could have named too, for errors. Raises `UnknownModel`.
    """
    if model in served:
        return model
    if not model and len(served) == 1:
        return served[0]
    names = ", ".join(map(repr, [*served, *adapters][:MAX_NAMES]))
    if len(served) == 1:
        one_of = "one of " if adapters else ""
        raise UnknownModel(f"model {_shown(model)} is not served here; leave it empty or ask for {one_of}{names}")
    if not model:
        raise UnknownModel(f"model is missing, and several are served here; ask for one of {names}")
    raise UnknownModel(f"model {_shown(model)} is not served here; ask for one of {names}")


def _shown(model: str) -> str:
    return repr(model if len(model) <= MAX_NAME_CHARS else model[:MAX_NAME_CHARS] + "...")


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

    `spec`: of the pools that serve this model. The context of the first model has `other_models`, the contexts of the
    others, and `all_models`, which answers for all.
    """

    name: str
    spec: ClusterSpec
    model: ModelView
    dispatcher: RequestDispatcher
    operator: Operator | None = None
    other_models: tuple["GatewayContext", ...] = ()
    all_models: ClusterQueries | None = None

    @property
    def models(self) -> tuple["GatewayContext", ...]:
        """The context of each model."""
        return self, *self.other_models

    @property
    def queries(self) -> ClusterQueries:
        """The queries about the whole cluster."""
        return self.all_models or self.dispatcher


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
