"""Loads that change their shape: denser means more requests in the same time, of the same pattern."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.elastic.streams import SPREAD_S, Stream, denser, sine, superposed
from cluster.offline.workload.arrivals import Arrival, Workload, WorkloadError
from cluster.offline.workload.lengths import LengthMix, Uniform

LENGTHS = LengthMix(((Uniform(10, 900), Uniform(1, 90)),))


def alternating(rate: float = 5.0, span: float = 100.0) -> tuple[Stream, Stream]:
    steps = ((span, rate), (span, 0.0), (span, 2 * rate))
    return Stream("one", LENGTHS, steps), Stream("other", LengthMix(((Uniform(5, 5), Uniform(5, 5)),)), steps)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_each_step_has_its_rate_times_the_scale(scale: float) -> None:
    made = superposed("load", alternating(), scale, 1).arrivals
    counts = [sum(begin <= each.at_s < begin + 100.0 for each in made) for begin in (0.0, 100.0, 200.0)]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(2 * 500 * scale, rel=0.15)
    assert counts[2] == pytest.approx(2 * 1000 * scale, rel=0.15)
    assert all(sooner.at_s <= later.at_s for sooner, later in pairwise(made))


@given(scale=st.floats(0.05, 4.0), factor=st.floats(1.0, 3.0), seed=st.integers(0, 9))
def test_a_denser_load_begins_with_the_same_requests_in_the_same_order(scale: float, factor: float, seed: int) -> None:
    stream = (Stream("one", LENGTHS, ((20.0, 3.0), (10.0, 0.0), (30.0, 6.0))),)
    try:
        thin = superposed("load", stream, scale, seed).arrivals
    except WorkloadError:
        return  # nobody came
    dense = superposed("load", stream, scale * factor, seed).arrivals
    assert len(dense) >= len(thin)
    for one, other in zip(thin, dense, strict=False):
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
        assert other.at_s <= one.at_s + 1e-9
    assert all(0.0 <= each.at_s <= 60.0 for each in dense)


def test_seeds_and_streams_are_independent() -> None:
    one, other = (superposed("load", alternating(), 1.0, seed).arrivals for seed in (0, 1))
    assert [each.at_s for each in one[:20]] != [each.at_s for each in other[:20]]
    first, second = (superposed("load", [each], 1.0, 0).arrivals for each in alternating())
    assert [each.at_s for each in first] != [each.at_s for each in second]


def test_a_sine_has_its_mean_and_its_swing() -> None:
    steps = sine(120.0, 4.0, 0.5, at=0.25)
    rates = [rate for _, rate in steps]
    assert sum(span for span, _ in steps) == pytest.approx(120.0)
    assert sum(rates) / len(rates) == pytest.approx(4.0)
    assert max(rates) == pytest.approx(6.0, rel=0.01) and min(rates) == pytest.approx(2.0, rel=0.01)
    assert rates[0] == pytest.approx(max(rates))


TRACE = Workload("trace", tuple(Arrival(0.5 * n, 600 + n, 10, (0, 1 + n)) for n in range(200)))


@given(thin=st.floats(0.05, 1.0), more=st.floats(0.0, 2.5), seed=st.integers(0, 9))
def test_a_thinner_trace_is_a_subset_of_a_denser_one(thin: float, more: float, seed: int) -> None:
    def originals(factor: float) -> set[int]:
        return {each.prompt_tokens for each in denser(TRACE, factor, seed).arrivals if each.prefix[0] == 0}

    assert originals(thin) <= originals(min(1.0, thin + more))
    assert originals(1.0 + more) == originals(1.0) == {each.prompt_tokens for each in TRACE.arrivals}


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.6])
def test_copies_of_a_denser_trace_are_near_their_originals(factor: float) -> None:
    made = denser(TRACE, factor, 3).arrivals
    assert len(made) == pytest.approx(200 * factor, rel=0.15)
    for each in made:
        number = each.prompt_tokens - 600
        assert abs(each.at_s - 0.5 * number) <= SPREAD_S
        copy, block = divmod(each.prefix[1], 201)
        assert block == 1 + number and each.prefix[0] == 201 * copy  # copies share with copies of their own number


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 1e9])
def test_invalid_scales_are_refused(scale: float) -> None:
    with pytest.raises(WorkloadError, match="load"):
        superposed("load", alternating(), scale, 0)
    with pytest.raises(WorkloadError, match="trace"):
        denser(TRACE, scale, 0)


@pytest.mark.parametrize("steps", [(), ((0.0, 1.0),), ((5.0, -1.0),), ((float("inf"), 1.0),)])
def test_invalid_steps_are_refused(steps: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(WorkloadError, match="stream one"):
        Stream("one", LENGTHS, steps)
