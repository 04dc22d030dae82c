"""A planner in the caller's own process, for clusters in virtual time: there, no time passes while it searches."""

import threading
from collections.abc import Callable
from typing import TypeVar

from cluster.control.replanning import Planned, Question
from cluster.offline.plan.refit import refitted
from cluster.offline.plan.roles import planned

T = TypeVar("T")


class Inline:
    """See `cluster.control.replanning.Planner`."""

    async def roles(self, question: Question) -> Planned:
        return _apart(lambda: planned(question))

    async def fleet(self, question: Question) -> str:
        return _apart(lambda: refitted(question))


def _apart(work: Callable[[], T]) -> T:
    """In a thread of its own, which is waited for: one that runs an event loop cannot run another."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
