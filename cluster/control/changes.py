"""Errors and messages of changes to a running cluster, between controller, server and gateways. Knows no worker.

ChangeError         the cluster is unchanged
├── StaleRevision   the caller has seen an older revision
├── UnknownMember   no such worker, pool or adapter; the message lists those that exist
├── ChangeRefused   it would break a floor or a bound, or no KV could move; the message has the reason
└── ControllerUnavailable  the controller does not answer; it may be restarting
"""

from dataclasses import dataclass

from cluster.spec import Role
from diptych.view import Adapter, GatewayView

MAX_DRAIN_S = 24 * 3600.0


class ChangeError(Exception):
    """Takes only its message, so that it can be pickled."""


class StaleRevision(ChangeError): ...


class UnknownMember(ChangeError): ...


class ChangeRefused(ChangeError): ...


class ControllerUnavailable(ChangeError): ...


@dataclass(frozen=True, slots=True)
class TargetWorker:
    """A worker that the cluster should have. `is_leaving`: it gets no new work and stops once it is empty."""

    name: str
    pool: str
    role: Role
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The state that the server stores for a restarted controller. The controller discovers everything else."""

    revision: int
    workers: tuple[TargetWorker, ...]
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The server's gateways, and the failure counts of its background tasks."""

    gateways: tuple[GatewayView, ...] = ()
    failures: tuple[tuple[str, int], ...] = ()
