"""Composition: a specification becomes a running cluster. The one place that joins runtime, controller and doors.

Knows who is built in which order and who closes whom; knows no scheduling and no wire format.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.events import Event
from cluster.spec import ClusterSpec
from cluster.view import ClusterView, ModelView
from workers.request import Request

Progress = Callable[[str], None]


class RequestDispatcher(Protocol):
    """What a door needs of the dispatcher."""

    def generate(
        self, request: Request, *, deadline_s: float | None = None, arrived_ns: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run one request. Closing the iterator, or cancelling the task that waits on it, cancels it on both workers.

        `deadline_s` counts from now. `arrived_ns` (of `time.monotonic_ns`) is when the gateway took the request; the
        ledger begins there.
        Errors: `cluster.events`.
        """
        ...

    def finish(self, request_id: str) -> None:
        """The door has seen enough (a stop string): the next event of `generate` is Completed(STOP), books balanced.

        Does nothing when the request is not running.
        """
        ...

    @property
    def view(self) -> ClusterView:
        """The latest picture of the cluster, statistics included."""
        ...

    def view_change(self) -> Awaitable[object]:
        """Done after the first change of membership or state that follows this call (the call, not its await)."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """What one gateway process hands to its door."""

    name: str
    spec: ClusterSpec
    model: ModelView
    dispatcher: RequestDispatcher


class Door(Protocol):
    """A server in front of a dispatcher."""

    async def open(self) -> str:
        """Listen; answer the endpoint "host:port". A port in use is an OSError that says so."""
        ...

    async def close(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end for `grace_s`, then cut them."""
        ...


DoorFactory = Callable[[GatewayContext], Door]
