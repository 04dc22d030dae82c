"""Shapes of loads: one load is not far from itself however it is drawn, another is found soon; memory is bounded."""

import math
import random
from collections.abc import Callable
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.policy.scaling.evidence import Report, Sample
from cluster.policy.scaling.load_shift import (
    LEAST_SAMPLES,
    MOST_REPORTS,
    MOST_SAMPLES,
    NEAR,
    Drift,
    Moved,
    Shape,
    distance,
    divergence,
    shape_of,
)
from workers.request import SLO

PROMISE = SLO(2.0, 0.05)
WINDOW_S = 20.0
Load = Callable[[random.Random], tuple[int, int]]  # prompt and output tokens of one request


def lognormal(prompt: float, output: float, sigma: float = 0.8) -> Load:
    def draw(source: random.Random) -> tuple[int, int]:
        return tuple(max(1, round(mean * source.lognormvariate(0.0, sigma))) for mean in (prompt, output))  # type: ignore[return-value]

    return draw


def sample(prompt: int, output: int, age_s: float = 0.0, cached: float = 0.0) -> Sample:
    computed = max(1, round(prompt * (1.0 - cached)))
    return Sample(prompt, computed, output, 0.5, 0.03, PROMISE.ttft_s, PROMISE.tpot_s, age_s=age_s)


def drawn(load: Load, count: int, rate: float, source: random.Random, cached: float = 0.0) -> Shape:
    ages, age_s = [], 0.0
    for _ in range(count):
        age_s += source.expovariate(rate)
        ages.append(age_s)
    return shape_of([sample(*load(source), cached=cached) for _ in ages], ages, count / age_s, PROMISE)


# ---- the distance ------------------------------------------------------------------------------------------------


def test_divergence_is_a_bit_for_what_has_nothing_in_common_and_none_for_equals() -> None:
    assert divergence([1.0, 0.0], [0.0, 1.0]) == pytest.approx(1.0)
    assert divergence([0.3, 0.7], [0.3, 0.7]) == 0.0
    assert divergence([1.0, 0.0], [0.5, 0.5]) == pytest.approx(0.811278 - 0.5, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 4000), st.integers(1, 800), st.floats(0.0, 1.2), st.integers(40, 400))
def test_two_draws_of_one_load_are_not_far_apart(seed: int, prompt: int, output: int, sigma: float, count: int) -> None:
    source, load = random.Random(seed), lognormal(prompt, output, sigma)
    one, other = (drawn(load, count, 5.0, source) for _ in range(2))
    assert distance(one, other).most < 1.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 4000), st.floats(0.0, 1.2), st.floats(0.2, 5.0), st.integers(40, 400))
def test_it_is_symmetric_and_nothing_to_oneself(
    seed: int, prompt: int, sigma: float, factor: float, count: int
) -> None:
    source = random.Random(seed)
    one = drawn(lognormal(prompt, 100, sigma), count, 5.0, source)
    other = drawn(lognormal(prompt * factor, 100 / factor, sigma), 2 * count, 5.0 * factor, source)
    there, back = distance(one, other), distance(other, one)
    assert astuple(there) == pytest.approx(astuple(back))
    assert distance(one, one).most == 0.0


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"prompt": 900.0}, "prompt"),
        ({"output": 300.0}, "output"),
        ({"rate": 20.0}, "rate"),
        ({"cached": 0.8}, "computed"),
    ],
)
def test_what_changes_is_what_is_far(change: dict[str, float], where: str) -> None:
    source = random.Random(1)
    figures = {"prompt": 300.0, "output": 100.0, "rate": 5.0, "cached": 0.0}
    one, other = (
        drawn(lognormal(each["prompt"], each["output"]), 300, each["rate"], source, each["cached"])
        for each in (figures, figures | change)
    )
    found = distance(one, other)
    assert getattr(found, where) >= 1.0 and where in str(found)
    if where in ("output", "rate"):
        assert found.prompt < NEAR


def test_lengths_between_two_buckets_are_not_far_from_each_other() -> None:
    one, other = (shape_of([sample(each, 100)] * 2000, range(2000), 1.0, PROMISE) for each in (508, 516))
    assert distance(one, other).most < 0.3


def test_bursts_and_promises_count() -> None:
    samples = [sample(100, 100)] * 300
    even = shape_of(samples, [index * 0.2 for index in range(300)], 5.0, PROMISE)
    bursts = shape_of(samples, [index // 30 * 6.0 + index % 30 * 0.001 for index in range(300)], 5.0, PROMISE)
    assert distance(even, bursts).burstiness >= 1.0 and bursts.burstiness > 10 > 1e-6 > even.burstiness
    stricter, none = (replace(even, slo=SLO(ttft_s, 0.05)) for ttft_s in (0.5, None))
    assert distance(even, stricter).promise >= 1.0 and distance(even, none).promise == math.inf


def test_who_was_turned_away_has_a_prompt_and_no_answer() -> None:
    refused = Sample(5000, 0, 0, refused=True)
    shape = shape_of([sample(100, 10)] * 50 + [refused] * 50, [0.0] * 100, 5.0, PROMISE)
    assert (shape.prompt.count, shape.computed.count, shape.output.count) == (100, 50, 50)
    assert shape.prompt.mean == 2550 and shape.output.mean == 10
    assert shape.slo == PROMISE
    everybody = shape_of([refused] * 50, [0.0] * 50, 5.0, PROMISE)
    assert distance(shape, everybody).output == 0.0, "nothing is known of answers that nobody got"
    with pytest.raises(ValueError, match="no requests"):
        shape_of([], [], 5.0, PROMISE)


# ---- the drift ---------------------------------------------------------------------------------------------------


class Told:
    """A drift that hears of a load every second."""

    def __init__(self, seed: int = 0, rest_s: float = 60.0) -> None:
        self.subject = Drift(WINDOW_S, rest_s, PROMISE)
        self.source = random.Random(seed)
        self.now_s = 0.0

    def hear(self, seconds: int, load: Load, rate: float = 5.0) -> list[Moved]:
        found = []
        for _ in range(seconds):
            self.now_s += 1.0
            limit, count = math.exp(-rate), 0
            product = self.source.random()
            while product > limit:  # Poisson (Knuth)
                count, product = count + 1, product * self.source.random()
            ended = tuple(sample(*load(self.source), age_s=self.source.random()) for _ in range(count))
            self.subject.told(Report("g", 1.0, count, 0, samples=ended), self.now_s)
            if (moved := self.subject.moved(self.now_s)) is not None:
                found.append(moved)
        return found


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 2000), st.integers(2, 400), st.floats(0.0, 1.2))
def test_a_load_that_stays_never_drifts(seed: int, prompt: int, output: int, sigma: float) -> None:
    assert not Told(seed).hear(300, lognormal(prompt, output, sigma))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.25, 0.4, 2.5, 4.0]), st.sampled_from(["prompt", "output", "rate"]))
def test_a_shift_is_found_within_three_windows(seed: int, factor: float, what: str) -> None:
    told = Told(seed)
    told.hear(60, lognormal(400, 100))
    factors = {"prompt": 1.0, "output": 1.0, "rate": 1.0} | {what: factor}
    then = lognormal(400 * factors["prompt"], 100 * factors["output"])
    found = told.hear(round(3 * WINDOW_S), then, 5.0 * factors["rate"])
    assert found and str(found[-1].before) != str(found[-1].after)
    assert found[-1].distance == distance(found[-1].before, found[-1].after)


def test_it_goes_on_saying_so_until_there_is_a_plan_and_then_compares_with_that() -> None:
    told = Told()
    short, long = lognormal(200, 200), lognormal(2000, 20)
    told.hear(60, short)
    assert len(told.hear(100, long)) > 10
    moved = told.subject.moved(told.now_s)
    assert moved is not None
    told.subject.planned(moved.after, told.now_s)
    assert not told.hear(100, long)
    assert told.hear(60, short), "back to what it was before the plan is a drift too"


def test_after_a_try_it_rests() -> None:
    told = Told(rest_s=100.0)
    told.hear(60, lognormal(200, 200))
    told.hear(80, lognormal(2000, 20))
    assert told.subject.moved(told.now_s) is not None
    told.subject.tried(told.now_s)
    assert not told.hear(99, lognormal(2000, 20))
    assert told.hear(2, lognormal(2000, 20))


def test_a_burst_shorter_than_the_window_is_no_drift() -> None:
    told = Told()
    told.hear(60, lognormal(400, 100))
    assert not told.hear(10, lognormal(400, 100), 25.0)
    assert not told.hear(60, lognormal(400, 100))


def test_nothing_is_said_of_little() -> None:
    told = Told()
    assert not told.hear(200, lognormal(400, 100), 0.1) and told.subject.shape(told.now_s) is None
    quiet = Told()
    assert quiet.subject.moved(0.0) is None
    quiet.hear(round(2 * WINDOW_S) - 1, lognormal(400, 100))
    assert quiet.subject.shape(quiet.now_s) is None, "the first window has the short answers only"
    quiet.hear(3, lognormal(400, 100))
    shape = quiet.subject.shape(quiet.now_s)
    assert shape is not None and shape.prompt.count >= LEAST_SAMPLES
    assert shape.rate == pytest.approx(5.0, rel=0.3) and shape.burstiness == pytest.approx(1.0, abs=0.7)


def test_memory_is_bounded() -> None:
    subject = Drift(1e9, 1.0, PROMISE)
    for index in range(MOST_REPORTS + 100):
        subject.told(Report("g", 1.0, 3, 0, samples=(sample(10, 10, age_s=index % 3),) * 3), float(index))
    kept = subject.recent()
    assert len(kept) == MOST_SAMPLES and len(subject._reports) == MOST_REPORTS
    assert [each.arrived_s for each in kept] == sorted(each.arrived_s for each in kept)
