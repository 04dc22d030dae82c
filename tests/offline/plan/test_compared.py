"""Differences are paired by seed."""

import pytest

from cluster.offline.plan.compared import difference


def test_what_a_seed_does_to_both_is_no_difference() -> None:
    found = difference([1.0, 5.0, 9.0], [2.0, 6.0, 10.0])
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
    assert found.is_sure


def test_students_interval_over_three_seeds() -> None:
    found = difference([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.303 / 3**0.5)  # t with 2 degrees of freedom; deviation 1
    assert not found.is_sure


def test_one_seed_is_never_sure() -> None:
    found = difference([1.0], [9.0])
    assert found.mean == 8.0
    assert not found.is_sure
    assert "one seed" in found.told("requests/s")


def test_unequal_seeds_are_refused() -> None:
    with pytest.raises(ValueError):
        difference([1.0], [1.0, 2.0])
