"""Makes prompts wait for what is fetched, so that what is cached does not depend on how fast computing it is."""

import pytest

from workers.engine.race import Choice, Gap, StepSeconds, choose


def wait_for_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(gap: Gap, seconds: StepSeconds) -> Choice:
        return Choice(0, True, 0.0) if gap.can_wait else choose(gap, seconds)

    monkeypatch.setattr("workers.engine.prefetch.choose", wait)
    monkeypatch.setattr("workers.engine.prefetch.PATIENCE", 1e9)
