"""A search that may take a while: limited in time, with progress, stopped by Ctrl-C with the best answer so far."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from cluster.cli.screen import console, say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cluster.offline.plan.budget import Budget

T = TypeVar("T")

LINE_S = 2.0  # between lines where there is no terminal
WIDTH = 40
INTERRUPTED = 130  # the exit status after Ctrl-C, as shells have it


class SearchProgress(Protocol):
    """`update` may be called by any thread; `tick` by the one that waits."""

    def update(self, what: str, how_far: str) -> None: ...
    def tick(self, left_s: float) -> None: ...


class SearchLines:
    """What has changed, as lines, every few seconds."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}
        self._new: dict[str, str] = {}
        self._next_s = 0.0

    def update(self, what: str, how_far: str) -> None:
        self._new[what] = how_far

    def tick(self, left_s: float) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LINE_S
        for what, how_far in list(self._new.items()):
            if self._shown.get(what) != how_far:
                self._shown[what] = how_far
                say(f"{what}: {how_far} (at most {left_s:.0f} s left)")


class Bar:
    """A bar of the time, and below it a row for each thing that is searched."""

    def __init__(self, limit_s: float, draw: "Callable[[RenderableType], None]") -> None:
        self._limit_s = limit_s
        self._draw = draw
        self._rows: dict[str, str] = {}

    def update(self, what: str, how_far: str) -> None:
        self._rows[what] = how_far

    def tick(self, left_s: float) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._limit_s, completed=self._limit_s - left_s, width=WIDTH)
        head.add_row("simulating", bar, f"at most {left_s:.0f} s left; Ctrl-C prints the best so far")
        rows = Table.grid(padding=(0, 1))
        for what, how_far in list(self._rows.items()):
            rows.add_row(what, how_far)
        self._draw(Group(head, rows))


@contextmanager
def shown(limit_s: float) -> Iterator[SearchProgress]:
    """On a terminal a bar, elsewhere lines; both on stderr."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield SearchLines()
        return
    from rich.live import Live

    with Live(console=out, transient=True, auto_refresh=False) as live:
        yield Bar(limit_s, lambda what: live.update(what, refresh=True))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def search(limit_s: float, processes: int | None, work: "Callable[[Budget, SearchProgress], T]") -> tuple[T, str]:
    """What `work` finds in the time, and what ended it: empty when it came to its own end."""
    from cluster.offline.plan.budget import Budget

    with shown(limit_s) as progress, Budget(limit_s, processes or cores()) as budget:
        found = budget.run(lambda: work(budget, progress), progress.tick)
        return found, budget.ended_by


def cut_short(ended_by: str, limit_s: float) -> list[str]:
    """A line that marks an answer as incomplete."""
    if not ended_by:
        return []
    more = f"; for more, give --limit above {limit_s:g} s" if ended_by != "Ctrl-C" else ""
    return ["", f"{ended_by} ended the simulation: this is the best answer so far{more}"]
