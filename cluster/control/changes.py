"""Changes to a running cluster: how they are refused, what is kept of decisions, what outlives a controller.

Knows no worker and no runtime: these are the words that controller, server and gateways exchange about them.

ChangeError
├── StaleRevision   the caller looked at an older cluster
├── UnknownMember   no such worker or pool; the message lists those there are
├── ChangeRefused   it would break a floor or a bound, or no KV could move; the message has the reason
└── ControllerAway  nobody can change anything now
"""

from dataclasses import dataclass

from cluster.spec import Role
from diptych.view import GatewayView
from diptych.view import Taken as Taken

LONGEST_DRAIN_S = 24 * 3600.0


class ChangeError(Exception):
    """The cluster is as it was. Takes its message only: it crosses processes."""


class StaleRevision(ChangeError):
    """What the caller saw is no more; it should look again."""


class UnknownMember(ChangeError):
    """There is no worker, or no pool, of this name."""


class ChangeRefused(ChangeError):
    """The cluster would be worse than its operator allows, or could not work."""


class ControllerAway(ChangeError):
    """The controller does not answer; it may be restarting."""


@dataclass(frozen=True, slots=True)
class Post:
    """A worker that shall be. `is_leaving`: it takes no new work, and ends when it has none."""

    name: str
    pool: str
    role: Role
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """What the server gives a restarted controller, which finds out everything else."""

    revision: int
    posts: tuple[Post, ...]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What the server of a cluster sees: its gateways, and how often its background tasks failed."""

    gateways: tuple[GatewayView, ...] = ()
    failures: tuple[tuple[str, int], ...] = ()
