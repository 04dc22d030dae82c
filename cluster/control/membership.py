"""The membership, which the controller publishes: workers and their handles, links, pools, and connected gateways.

A gateway that has an earlier revision gets only what changed since then.
"""

import itertools
from collections.abc import Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from cluster.runtime.interface import WorkerHandle
from diptych.view import Adapter, GatewayView, PoolView, TaskFailures, WorkerView
from kvtransfer.ticket import LinkReport

APART_S, AT_ONCE = 0.2, 20  # time between answers to a gateway, once it has had so many at once


class Member(Struct, frozen=True):
    """One worker. `handle` is None while it starts."""

    view: WorkerView
    handle: WorkerHandle | None


class Membership(Struct, frozen=True):
    """`revision` grows with every change, except of `gateways`, the gateways that poll the membership.

    `links`: a sample of the measured links. `unlinked`: pairs (owner, reader) between which KV cannot move. `links_id`
    identifies both, and the controller; a gateway that has them already gets neither. `since`: only the members that
    changed after this revision are here; 0: all are. `names`: all members in order; None: as in that revision.
    """

    revision: int
    members: tuple[Member, ...] = ()
    links: tuple[LinkReport, ...] = ()
    unlinked: frozenset[tuple[str, str]] = frozenset()
    pools: tuple[PoolView, ...] = ()
    gateways: tuple[str, ...] = ()
    served_gateways: tuple[GatewayView, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    failures: tuple[TaskFailures, ...] = ()
    links_id: str = ""
    since: int = 0
    names: tuple[str, ...] | None = None

    def after(self, before: "Membership") -> "Membership":
        """The whole membership: what is left out here is as `before`, of revision `since`."""
        whole = self
        if self.since:
            members = {member.view.name: member for member in (*before.members, *self.members)}
            names = members if self.names is None else self.names
            whole = replace(self, members=tuple(members[name] for name in names), since=0, names=None)
        if self.links_id != before.links_id:
            return whole
        return replace(whole, links=before.links, unlinked=before.unlinked)

    def of_pools(self, names: Collection[str]) -> "Membership":
        """A whole membership without the pools, workers and links of others; itself if there are none."""
        if all(pool.name in names for pool in self.pools):
            return self
        members = tuple(member for member in self.members if member.view.pool in names)
        workers = {member.view.name for member in members}
        return replace(
            self,
            members=members,
            links=tuple(link for link in self.links if link.owner in workers and link.reader in workers),
            unlinked=frozenset(pair for pair in self.unlinked if workers.issuperset(pair)),
            pools=(pools := tuple(pool for pool in self.pools if pool.name in names)),
            adapters=tuple(adapter for adapter in self.adapters if adapter.model in {pool.model for pool in pools}),
        )


class Revisions:
    """When each member changed last. Owned by a Controller."""

    def __init__(self) -> None:
        self.now = 0
        self._names = 0  # the revision of the latest change of the names
        self._changed: dict[str, int] = {}  # by name, the latest last

    def changed(self, name: str = "") -> None:
        """A member changed; without a name: another part of the membership."""
        self.now += 1
        if name:
            self._changed.pop(name, None)
            self._changed[name] = self.now

    def renamed(self) -> None:
        """Members were added, removed or sorted, which the next revision publishes."""
        self._names = self.now + 1

    def since(self, revision: int) -> list[str]:
        """The members that changed after a revision; some may have left."""
        recent = itertools.takewhile(lambda each: each[1] > revision, reversed(self._changed.items()))
        return [name for name, _ in recent]

    def names_changed(self, revision: int) -> bool:
        """Whether the names changed after a revision."""
        return self._names > revision


def task_failures(**by_process: Iterable[tuple[str, int]]) -> tuple[TaskFailures, ...]:
    """Failure counts of the background tasks of each process."""
    return tuple(TaskFailures(process, task, count) for process, counts in by_process.items() for task, count in counts)


class PollingGateways:
    """The gateways that poll the membership, in the order in which they joined. Owned by a Controller."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._spaced_s: dict[str, float] = {}

    def answer_s(self, gateway: str, now_s: float) -> float:
        """When to answer a gateway: now, or later after many answers, so that changes in quick succession are one."""
        spaced_s = max(now_s, self._spaced_s.get(gateway, now_s))
        self._spaced_s[gateway] = spaced_s + APART_S
        return max(now_s, spaced_s - AT_ONCE * APART_S)

    def polled(self, gateway: str, now_s: float, until_s: float) -> None:
        """A gateway polled, and will poll again before `until_s`."""
        self.names(now_s)
        self._until_s[gateway] = until_s  # a known gateway keeps its place

    def names(self, now_s: float) -> tuple[str, ...]:
        """The gateways that are not overdue. Drops those that are; they join again as the last."""
        self._until_s = {name: until_s for name, until_s in self._until_s.items() if until_s > now_s}
        self._spaced_s = {name: at_s for name, at_s in self._spaced_s.items() if name in self._until_s}
        return tuple(self._until_s)
