"""Under overload an accepted request is a promise, and more promises are kept than by taking everybody."""

import pytest

from benchmarks.admission import KINDS, overloaded


@pytest.mark.campaign
def test_accepted_requests_are_kept_and_there_are_more_of_them() -> None:
    pools = KINDS["two and two"]
    all_taken, _ = overloaded(pools, "none", 40.0, count=200)
    kept, held = overloaded(pools, "slo", 40.0, count=200)
    assert held >= 0.97
    assert kept >= 1.1 * all_taken
