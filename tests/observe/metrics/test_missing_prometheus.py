"""Without Prometheus its tests are skipped with a reason, unless it is required."""

import shutil

import pytest

from tests.observe.metrics import prometheus

WHY = "nothing is tried with the real promtool: it is not on the PATH, and apt-get cannot fetch it"


@pytest.fixture(autouse=True)
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(prometheus, "_unpacked", lambda: (None, "apt-get cannot fetch it"))


def test_a_missing_prometheus_skips_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prometheus.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{WHY} .DIPTYCH_PROMETHEUS=1 makes this a failure"):
        prometheus.program("promtool")


def test_a_missing_prometheus_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prometheus.REQUIRED, "1")
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception), match=WHY) as caught:
        prometheus.program("promtool")
    assert caught.type is pytest.fail.Exception, "a skip would hide itself here"
