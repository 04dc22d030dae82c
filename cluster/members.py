"""What the controller publishes to gateways: the members, how to call them, and which pairs may move KV."""

from dataclasses import dataclass

from cluster.runtime.interface import WorkerHandle
from cluster.view import PoolView, WorkerView
from kvtransfer.ticket import LinkReport


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. `handle` is None while it is being started."""

    view: WorkerView
    handle: WorkerHandle | None


@dataclass(frozen=True, slots=True)
class Membership:
    """`revision` grows with every change."""

    revision: int
    members: tuple[Member, ...] = ()
    links: tuple[LinkReport, ...] = ()
    pools: tuple[PoolView, ...] = ()

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """Owner and reader of each link."""
        return frozenset((link.owner, link.reader) for link in self.links)
