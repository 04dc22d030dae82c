"""Migrations that fail or raise are counted and logged, and the next ones are planned."""

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from cluster.control.supervision import Failures
from cluster.dispatch.migration_loop import MigrationLoop
from cluster.policy.scaling.migrations import Move
from diptych.view import ClusterView

VIEW = ClusterView(1, "c", None, ())


class Plans:
    """One move the first two times, then none."""

    def __init__(self) -> None:
        self.asked = 0
        self.told: list[tuple[str, bool]] = []

    def plan(self, view: ClusterView, contexts: Mapping[str, int], now_s: float) -> list[Move]:
        self.asked += 1
        key = f"r{self.asked}/0"
        return [Move(key, "a", "b", "there is room", "role")] if self.asked <= 2 else []

    def may_move(self, view: ClusterView) -> bool:
        return True

    def ended(self, move: Move, now_s: float, *, moved: bool) -> None:
        self.told.append((move.key, moved))


def test_a_migration_that_raises_is_logged_and_the_next_round_runs(caplog: pytest.LogCaptureFixture) -> None:
    plans = Plans()

    async def move(key: str, target: str) -> bool:
        if key == "r1/0":
            raise RuntimeError("this was not foreseen")
        return True

    async def changed() -> None:
        await asyncio.Event().wait()

    async def scene() -> tuple[tuple[str, str, int], ...]:
        requeue = SimpleNamespace(candidates=lambda view, now_s: [], is_on=False)
        subject = MigrationLoop(plans, requeue, lambda: VIEW, changed, lambda: {"r": 1}, move, lambda key: False)  # type: ignore[arg-type]
        subject.start(Failures())
        subject.round()
        async with asyncio.timeout(10.0):
            while plans.asked < 3:
                await asyncio.sleep(0.01)
        await subject.close()
        return subject.counts()

    with caplog.at_level(logging.ERROR):
        counts = asyncio.run(scene())
    assert plans.told == [("r1/0", False), ("r2/0", True)]
    assert counts == (("role", "moved", 1), ("role", "stayed", 1))
    assert "r1/0 stays on a" in caplog.text and "this was not foreseen" in caplog.text
