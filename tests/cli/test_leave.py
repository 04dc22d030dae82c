"""`diptych leave` while a controller is away: it asks again until its deadline."""

from typing import Any

import pytest

from cluster.cli.leave import _empty
from cluster.runtime.runtime_errors import WorkerGone


class AwayController:
    """Fails `failures` calls, as a controller that restarts does; `drain_workers` then empties the node."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.workers = {"llm": ["prefill-0"]}
        self.calls: list[str] = []

    async def call(self, method: str, *_: object, timeout_s: float = 0.0) -> int:
        self.calls.append(method)
        if len(self.calls) <= self.failures:
            raise WorkerGone("the controller restarts")
        if method == "drain_workers":
            self.workers.clear()
        return 7


def seen_by(monkeypatch: pytest.MonkeyPatch, controller: AwayController, *, found: bool = True) -> None:
    place: Any = "cluster.runtime.ray_nodes"
    monkeypatch.setattr(f"{place}.workers_on", lambda node: dict(controller.workers))
    monkeypatch.setattr(f"{place}.find_controller", lambda name: controller if found else None)
    monkeypatch.setattr("cluster.cli.leave.RETRY_S", 0.01)


async def test_a_controller_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = AwayController(failures=3)
    seen_by(monkeypatch, controller)
    result = await _empty("node", 10.0)
    assert (result.left, result.still_there) == (("llm/prefill-0",), ())
    assert controller.calls == ["drain_workers"] * 4 + ["members"]


async def test_a_controller_that_stays_away_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = AwayController(failures=1_000_000)
    seen_by(monkeypatch, controller)
    result = await _empty("node", 0.1)
    assert result.still_there == ("llm/prefill-0",) and result.seconds >= 0.1


async def test_a_cluster_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = AwayController(failures=0)
    seen_by(monkeypatch, controller, found=False)
    result = await _empty("node", 10.0)
    assert not controller.calls and result.still_there == ("llm/prefill-0",)
