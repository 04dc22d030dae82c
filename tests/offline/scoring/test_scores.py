"""Splitwise's nine bounds and FastGen's effective throughput, on runs made by hand."""

import math
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.offline.scoring.records import Run, Served
from cluster.offline.scoring.scores import effective_throughput, nine_way
from tests.offline.scoring.made import refused, served, steady


def run(requests: list[Served], seconds: float = 10.0) -> Run:
    return Run("s", "w", "virtual", 0, 2, seconds, 0.1, tuple(requests))


def alone(prompt: int, output: int) -> tuple[float, float]:
    return prompt / 1000, 0.01


def test_an_idle_machine_slows_nobody_down() -> None:
    made = nine_way(run([steady(n, n, 0.1, 0.01, 5) for n in range(10)]), alone)
    assert all(value == pytest.approx(1.0) for values in made.slowdowns for value in values)
    assert made.met


def test_each_of_nine_bounds_is_judged() -> None:
    quick = [steady(n, n, 0.1, 0.01, 5) for n in range(85)]
    slow = [steady(85 + n, n, 0.1 * (3 + n), 0.02, 5) for n in range(15)]  # TTFT 3 to 17 times
    made = nine_way(run(quick + slow), alone)
    ttft, tbt, e2e = made.slowdowns
    assert ttft == pytest.approx((1.0, 7.0, 16.0))
    assert tbt == pytest.approx((1.0, 2.0, 2.0))
    assert e2e == pytest.approx((1.0, (0.7 + 0.08) / 0.14, (1.6 + 0.08) / 0.14))
    assert not made.met
    assert made.broken == (
        "TTFT P90 7x > 3x",
        "TTFT P99 16x > 6x",
        "TBT P90 2x > 1.5x",
        "E2E P90 5.57x > 1.5x",
        "E2E P99 12x > 5x",
    )


def test_refused_requests_are_infinitely_slow() -> None:
    made = nine_way(run([*(steady(n, n, 0.1, 0.01, 5) for n in range(9)), refused(9, 9.0), refused(10, 9.0)]), alone)
    assert made.slowdowns[0][:2] == (pytest.approx(1.0), math.inf)
    assert not made.met


def test_answers_of_one_token_have_no_part_in_tbt() -> None:
    made = nine_way(run([steady(0, 0.0, 0.1, 0.0, 1)]), alone)
    assert made.slowdowns == ((pytest.approx(1.0),) * 3, (0.0,) * 3, (pytest.approx(1.0),) * 3)


def test_a_reference_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        nine_way(run([steady(0, 0.0, 0.1, 0.01, 5)]), lambda prompt, output: (0.1, 0.0))


def test_effective_throughput_counts_who_is_fast_at_every_token() -> None:
    good = steady(0, 0.0, 0.9, 0.2, 30, prompt_tokens=512)
    late = steady(1, 0.0, 1.1, 0.2, 30, prompt_tokens=512)
    slow = steady(2, 0.0, 0.9, 0.3, 30, prompt_tokens=512)
    single = steady(3, 0.0, 0.9, 0.0, 1, prompt_tokens=512)
    every = run([good, late, slow, single, refused(4, 0.0)])
    assert effective_throughput(every, 4.0) == pytest.approx(0.2)
    assert effective_throughput(every, 2.0) == pytest.approx(0.3)
    assert effective_throughput(every, 6.0) == pytest.approx(0.1)


def test_one_stall_late_in_an_answer_is_averaged_away_and_one_at_its_beginning_is_not() -> None:
    def stalled(at: int) -> Served:
        times = [0.5]
        for n in range(40):
            times.append(times[-1] + (0.6 if n == at else 0.1))
        return served(0, 0.0, times, prompt_tokens=512)

    assert effective_throughput(run([stalled(30)]), 4.0) == pytest.approx(0.1)
    assert effective_throughput(run([stalled(0)]), 4.0) == 0.0


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40))
def test_the_moving_average_has_the_weights_of_an_exponential_window(gaps: list[float]) -> None:
    keep = 1 - 2 / (16 + 1)
    averages = []
    for n in range(1, len(gaps) + 1):
        weights = [keep ** (n - 1 - k) for k in range(n)]
        averages.append(sum(w * gap for w, gap in zip(weights, gaps, strict=False)) / sum(weights))
    request = served(0, 0.0, list(accumulate(gaps, initial=0.5)), prompt_tokens=512)
    assert effective_throughput(run([request]), 0.999 / max(averages)) > 0.0
    assert effective_throughput(run([request]), 1.001 / max(averages)) == 0.0
