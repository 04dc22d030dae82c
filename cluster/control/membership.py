"""What the controller publishes to gateways: the members, how to call them, which pairs may move KV, who listens."""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.runtime.interface import WorkerHandle
from diptych.view import GatewayView, PoolView, TaskFailures, WorkerView
from kvtransfer.ticket import LinkReport


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. `handle` is None while it is being started."""

    view: WorkerView
    handle: WorkerHandle | None


@dataclass(frozen=True, slots=True)
class Membership:
    """`revision` grows with every change. `gateways` are those that listen; they come and go without a revision.

    `links_id` names these links: who has them already gets none again.
    """

    revision: int
    members: tuple[Member, ...] = ()
    links: tuple[LinkReport, ...] = ()
    pools: tuple[PoolView, ...] = ()
    gateways: tuple[str, ...] = ()
    served_gateways: tuple[GatewayView, ...] = ()
    failures: tuple[TaskFailures, ...] = ()
    links_id: str = ""

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """Owner and reader of each link."""
        return frozenset((link.owner, link.reader) for link in self.links)


def task_failures(**by_process: Iterable[tuple[str, int]]) -> tuple[TaskFailures, ...]:
    """By process, how often each of its background tasks failed."""
    return tuple(TaskFailures(process, task, count) for process, counts in by_process.items() for task, count in counts)


class Listeners:
    """The gateways that ask for the membership, first those that have long done so. Owned by a Controller."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def asked(self, gateway: str, now_s: float, until_s: float) -> None:
        """It is there, and will have asked again by then."""
        self.names(now_s)
        self._until_s[gateway] = until_s  # one that is known keeps its place

    def names(self, now_s: float) -> tuple[str, ...]:
        """Who is silent for too long is not among them, and begins behind all others."""
        self._until_s = {name: until_s for name, until_s in self._until_s.items() if until_s > now_s}
        return tuple(self._until_s)
