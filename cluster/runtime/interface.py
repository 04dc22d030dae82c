"""The port to whatever runs workers and services.

A runtime starts, restarts and stops; it does not decide. Handles may be kept, compared by name and, under Ray, sent to
other processes. A call to a process that died, or that does not answer in time, raises `WorkerGone`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.spec import Resources
from diptych.shapes import Shape, Timings
from kvtransfer.ticket import LinkReport, PeerAddress, TransferTicket
from workers.config import WorkerConfig
from workers.kv_events import KVEvents
from workers.request import Bundle, Request, Reservation
from workers.stats import WorkerInfo


class WorkerHandle(Protocol):
    """A `workers.worker.Worker`, wherever it lives. See there for each verb."""

    def at(self, incarnation: str) -> "WorkerHandle":
        """A handle whose calls reach this incarnation only; after a restart they raise `WorkerClosed`."""
        ...

    async def start(self) -> WorkerInfo: ...
    async def info(self) -> WorkerInfo: ...
    async def connect(self, peer: PeerAddress) -> LinkReport: ...
    async def reserve(self, request: Request, timeout_s: float) -> Reservation: ...
    async def prefill(self, request: Request, cut_tokens: int = 0) -> None: ...
    async def generate(self, request: Request) -> None: ...
    async def fetch(self, key: str, ticket: TransferTicket | None, goes_on: bool = False) -> None: ...
    async def decode(self, key: str, tokens: tuple[int, ...]) -> None: ...
    async def hand_over(self, key: str, most_tokens: int) -> TransferTicket | None: ...
    async def hold_prefix(self, request: Request) -> TransferTicket | None: ...
    async def fetch_prefix(self, request: Request, ticket: TransferTicket, timeout_s: float) -> int: ...
    async def cache_since(self, last: int, reach: int) -> KVEvents: ...
    async def cancel(self, key: str) -> None: ...
    async def holds(self, key: str) -> bool: ...
    async def poll(self, subscriber: str, received: int) -> Bundle: ...
    async def check(self) -> None: ...
    async def measure(self, shape: Shape, repeats: int) -> Timings: ...


class ServiceHandle(Protocol):
    """An object of ours in some process: the controller, a gateway."""

    async def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        """Call an async method. Raises `WorkerGone` when the service is gone or silent, or what the method raised."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """One worker to run: what it is, what it needs, and how often it must speak."""

    config: WorkerConfig
    resources: Resources
    heartbeat_s: float
    dead_after_s: float
    place_timeout_s: float = 30.0


class Runtime(Protocol):
    """Starts and stops processes."""

    @property
    def name(self) -> str: ...

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        """Place a worker. It may still be loading: await its `start`. Raises `RuntimeUnavailable`."""
        ...

    async def restart_worker(self, order: WorkerOrder, handle: WorkerHandle, incarnation: str) -> WorkerHandle:
        """Replace a worker that died, or that must die because this incarnation of it is silent or unfit."""
        ...

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        """Close a worker, killing it after `grace_s`."""
        ...

    async def start_service(self, name: str, factory: Callable[..., Any], *args: Any) -> ServiceHandle:
        """Run `factory(*args)` as a long-lived object; `factory` is importable by name."""
        ...

    async def restart_service(self, handle: ServiceHandle) -> ServiceHandle:
        """Kill a service that hangs; it is built again, without its old state."""
        ...

    async def stop_service(self, handle: ServiceHandle) -> None:
        """End it without asking."""
        ...

    async def end_all(self) -> None:
        """End whatever of this cluster still runs, without asking; what has ended already is no error."""
        ...

    async def close(self) -> None:
        """End all, and leave; a runtime that was started for us ends."""
        ...
