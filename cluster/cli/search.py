"""Runs a search with a time limit: shows progress and a first answer, and ends at Ctrl-C with the best so far."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from cluster.cli.screen import console, print_lines, say

if TYPE_CHECKING:
    from rich.live import Live

    from cluster.offline.plan.budget import Budget

T = TypeVar("T")

LINE_S = 2.0  # between lines where there is no terminal
WIDTH = 20  # of the bar
MARGIN = 4  # columns; a terminal shows ^C at the end of the last row, which must not break it
INTERRUPTED = 130  # the exit status after Ctrl-C, as in shells


class SearchProgress:
    """A bar of the elapsed time and a row per item; without `live`, a line on stderr per changed item.

    Any thread may call `update`; the waiting thread calls `tick`. `interim` gets the seconds since the start and
    returns lines to print on stdout at once, above the bar; usually none.
    """

    interim: Callable[[float], list[str]] = staticmethod(lambda seconds: [])

    def __init__(self, limit_s: float, live: "Live | None" = None) -> None:
        self._limit_s = limit_s
        self._live = live
        self._rows: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        self._next_s = 0.0

    def update(self, what: str, status: str) -> None:
        self._rows[what] = status

    def tick(self, left_s: float) -> None:
        if lines := self.interim(self._limit_s - left_s):
            self._print(lines)
        rows = list(self._rows.items())
        if self._live is not None:
            self._draw(self._live, rows, left_s)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_S
            for what, status in rows:
                if self._shown.get(what) != status:
                    self._shown[what] = status
                    say(f"{what}: {status} (at most {left_s:.0f} s left)")

    def _print(self, lines: list[str]) -> None:
        if self._live is not None:
            self._live.stop()
        print_lines([*lines, ""])
        if self._live is not None:
            self._live.start()

    def _draw(self, live: "Live", rows: list[tuple[str, str]], left_s: float) -> None:
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        head, table = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._limit_s, completed=self._limit_s - left_s, width=WIDTH)
        head.add_row("simulating", bar, f"at most {left_s:.0f} s left; Ctrl-C shows the best")
        for row in rows:
            table.add_row(*row)
        live.update(Constrain(Group(head, table), live.console.width - MARGIN), refresh=True)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def search(limit_s: float, processes: int | None, work: "Callable[[Budget, SearchProgress], T]") -> tuple[T, str]:
    """The result of `work`, which runs in its own thread, and what ended it early; empty: nothing."""
    from rich.live import Live

    from cluster.offline.plan.budget import Budget

    out = console(stderr=True)
    display = Live(console=out, transient=True, auto_refresh=False) if out.is_terminal else nullcontext()
    with display as live, Budget(limit_s, processes or cores()) as budget:
        progress = SearchProgress(limit_s, live)
        found = budget.run(lambda: work(budget, progress), progress.tick)
        return found, budget.ended_by


def cut_short(ended_by: str, limit_s: float) -> list[str]:
    """Lines that mark an answer as incomplete."""
    if not ended_by:
        return []
    more = f"; for more, give --limit above {limit_s:g} s" if ended_by != "Ctrl-C" else ""
    return ["", f"{ended_by} ended the run: this answer is incomplete{more}"]
