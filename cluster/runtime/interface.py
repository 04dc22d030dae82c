"""The runtime port: starts, restarts and stops workers and services. Decides nothing.

Handles may be stored, compared by name and, under Ray, sent to other processes. A call to a process that died, or that
does not answer in time, raises `WorkerGone`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.spec import Resources
from diptych.shapes import Shape, Timings
from kvtransfer.ticket import LinkReport, PeerAddress, TransferTicket
from workers.config import WorkerConfig
from workers.kv_events import KVEvents
from workers.request import DeferredReader, EngineOutputs, Request, Reservation
from workers.stats import WorkerInfo


class WorkerHandle(Protocol):
    """Starts a worker, and finds it from other processes."""

    def at(self, incarnation: str) -> "WorkerStub":
        """A new connection, to this incarnation only; its owner disconnects it."""
        ...

    async def start(self) -> WorkerInfo:
        """Load the worker, unless it has loaded."""
        ...


class WorkerStub(Protocol):
    """A connection to one incarnation of a `workers.worker.Worker`, which documents the methods.

    Calls raise `WorkerGone` or `WorkerClosed` once that incarnation has ended.
    """

    async def disconnect(self) -> None: ...
    async def connect(self, peer: PeerAddress) -> LinkReport: ...
    async def address(self) -> PeerAddress: ...
    async def reserve(self, request: Request, timeout_s: float) -> Reservation: ...
    async def prefill(self, request: Request, cut_tokens: int = 0) -> None: ...
    async def generate(self, request: Request, lenders: tuple[PeerAddress, ...] = ()) -> None: ...
    async def fetch(self, key: str, ticket: TransferTicket | None, starts_decoding: bool = False) -> None: ...
    async def decode(self, key: str, tokens: tuple[int, ...]) -> None: ...
    async def offer_migration(self, key: str, most_tokens: int) -> TransferTicket | None: ...
    async def hold_prefix(self, request: Request) -> TransferTicket | None: ...
    async def fetch_prefix(self, request: Request, ticket: TransferTicket, timeout_s: float) -> int: ...
    async def warm(self, request: Request, ttl_s: float, timeout_s: float) -> int: ...
    async def unpin(self, request: Request | None) -> int: ...
    async def cache_since(self, last: int, reach: int) -> KVEvents: ...
    async def cancel(self, key: str) -> None: ...
    async def holds(self, key: str) -> bool: ...
    async def subscribe(
        self, subscriber: str, on_outputs: Callable[[EngineOutputs], object], *, deferred: DeferredReader | None = None
    ) -> None: ...
    async def check(self) -> None: ...
    async def measure(self, shape: Shape, repeats: int) -> Timings: ...


class ServiceHandle(Protocol):
    """A handle to the controller or a gateway."""

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        """Call an async method. Raises the method's errors, and `WorkerGone` if the service is gone or silent."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """One worker to run: its configuration, resources, and heartbeat."""

    config: WorkerConfig
    resources: Resources
    heartbeat_s: float
    dead_after_s: float
    place_timeout_s: float = 30.0


class Runtime(Protocol):
    """Starts and stops processes."""

    @property
    def name(self) -> str: ...

    async def prestart(self, order: WorkerOrder) -> None:
        """Let a worker load before `start_worker` asks for it, if that is possible. Raises `RuntimeUnavailable`."""
        ...

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        """Place a worker. It may still be loading: await its `start`. Raises `RuntimeUnavailable`."""
        ...

    async def restart_worker(self, order: WorkerOrder, handle: WorkerHandle, incarnation: str) -> WorkerHandle:
        """Restart a worker that died, or kill and restart one if this `incarnation` is silent or unhealthy."""
        ...

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        """Close a worker; kill it after `grace_s`."""
        ...

    async def start_service(self, name: str, factory: Callable[..., Any], *args: Any) -> ServiceHandle:
        """Run `factory(*args)` as a long-lived object. `factory` must be importable by name."""
        ...

    async def restart_service(self, handle: ServiceHandle) -> ServiceHandle:
        """Kill and restart a service that hangs. It loses its state."""
        ...

    async def stop_service(self, handle: ServiceHandle) -> None:
        """Kill it."""
        ...

    async def end_all(self) -> None:
        """Kill everything of this cluster that still runs."""
        ...

    async def close(self) -> None:
        """Kill everything of this cluster, and stop the runtime if it was started for it."""
        ...
