"""Copies of a hot prefix: as many as its load needs, and other prefixes stay cached."""

import pytest

from benchmarks import hot_prefix


@pytest.mark.campaign
def test_a_hot_prefix_spreads_and_the_other_caches_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_prefix, "SECONDS", 24.0)
    monkeypatch.setattr(hot_prefix, "SAMPLES_S", (0.5, 3.5))
    found = hot_prefix.measure("mooncake")
    assert 2 <= found.copies[-1] <= hot_prefix.WORKERS
    assert found.hot_cached > 0.9 and found.cold_cached > 0.5 * found.cold_cached_before > 0.25
