"""Messages about changes to a running cluster that controller, server and gateways exchange. Knows no worker.

ChangeError         the cluster is unchanged
├── StaleRevision   the caller looked at an older revision
├── UnknownMember   no such worker or pool; the message lists those that exist
├── ChangeRefused   it would break a floor or a bound, or no KV could move; the message has the reason
└── ControllerAway  the controller does not answer; it may be restarting
"""

from dataclasses import dataclass

from cluster.spec import Role
from diptych.view import GatewayView

MAX_DRAIN_S = 24 * 3600.0


class ChangeError(Exception):
    """Takes its message only: it crosses processes."""


class StaleRevision(ChangeError): ...


class UnknownMember(ChangeError): ...


class ChangeRefused(ChangeError): ...


class ControllerAway(ChangeError): ...


@dataclass(frozen=True, slots=True)
class TargetWorker:
    """A worker that the cluster should have. `is_leaving`: it gets no new work and stops once it is empty."""

    name: str
    pool: str
    role: Role
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class ControllerState:
    """What the server stores for a restarted controller, which discovers everything else."""

    revision: int
    workers: tuple[TargetWorker, ...]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The server's gateways, and how often its background tasks failed."""

    gateways: tuple[GatewayView, ...] = ()
    failures: tuple[tuple[str, int], ...] = ()
