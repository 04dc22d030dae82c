"""The membership, which the controller publishes: workers and their handles, links, pools, and connected gateways."""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.runtime.interface import WorkerHandle
from diptych.view import GatewayView, PoolView, TaskFailures, WorkerView
from kvtransfer.ticket import LinkReport


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. `handle` is None while it starts."""

    view: WorkerView
    handle: WorkerHandle | None


@dataclass(frozen=True, slots=True)
class Membership:
    """`revision` grows with every change, except of `gateways`, the gateways that poll the membership.

    `links_id` identifies the links. A gateway that has them already gets none.
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
    """Failure counts of the background tasks of each process."""
    return tuple(TaskFailures(process, task, count) for process, counts in by_process.items() for task, count in counts)


class Listeners:
    """The gateways that poll the membership, in the order in which they joined. Owned by a Controller."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def polled(self, gateway: str, now_s: float, until_s: float) -> None:
        """A gateway polled, and will poll again before `until_s`."""
        self.names(now_s)
        self._until_s[gateway] = until_s  # a known gateway keeps its place

    def names(self, now_s: float) -> tuple[str, ...]:
        """The gateways that are not overdue. Drops those that are; they join again as the last."""
        self._until_s = {name: until_s for name, until_s in self._until_s.items() if until_s > now_s}
        return tuple(self._until_s)
