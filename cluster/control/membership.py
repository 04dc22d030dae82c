"""The membership, which the controller publishes: workers and their handles, links, pools, and connected gateways.

A gateway that has an earlier revision gets only what changed since then.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

from msgspec import Struct

from cluster.runtime.interface import WorkerHandle
from diptych.view import ClusterView, TaskFailures

APART_S, AT_ONCE = 0.2, 20  # time between answers to a gateway, once it has had so many at once


class Membership(Struct, frozen=True):
    """The cluster as the controller publishes it to gateways, and the handles of its workers (None while one starts).

    The revision grows with every change, except of the view's `gateways`, which poll the membership. `links_id`
    identifies the view's links and unlinked pairs, and the controller; a gateway that has them already gets neither.
    `since`: only the workers that changed after this revision are here; 0: all are. `names`: all workers in order;
    None: as in that revision.
    """

    view: ClusterView
    handles: dict[str, WorkerHandle | None] = {}
    links_id: str = ""
    since: int = 0
    names: tuple[str, ...] | None = None

    @property
    def revision(self) -> int:
        return self.view.revision

    def after(self, before: "Membership") -> "Membership":
        """The whole membership: what is left out here is as `before`, of revision `since`."""
        view, handles = self.view, self.handles
        if self.since:
            workers = {worker.name: worker for worker in (*before.view.workers, *view.workers)}
            names = tuple(workers) if self.names is None else self.names
            known = before.handles | handles
            view = replace(view, workers=tuple(workers[name] for name in names))
            handles = {name: known[name] for name in names}
        if self.links_id == before.links_id:
            view = replace(view, links=before.view.links, unlinked=before.view.unlinked)
        return Membership(view, handles, self.links_id)


NO_MEMBERSHIP = Membership(ClusterView(0, "", None, ()))


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
