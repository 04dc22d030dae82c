"""The fit finds the cost behind its points, and the best coefficients that are not negative."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.offline.profile.steps import HELD_OUT, SEEN
from diptych.shapes import Shape
from workers.costs import LinearCost, step_seconds
from workers.profiles.fit import COEFFICIENTS, FitError, Point, error_of, fit, non_negative

costs = st.builds(
    LinearCost,
    st.floats(1e-3, 1e-1),
    st.floats(1e-5, 1e-2),
    st.floats(0.0, 1e-6),
    st.floats(0.0, 1e-2),
    st.floats(0.0, 1e-5),
    swap_byte_s=st.floats(0.0, 1e-8),
)


def points(cost: LinearCost) -> list[Point]:
    return [Point(shape, step_seconds(shape, cost), shape in HELD_OUT) for shape in (*SEEN, *HELD_OUT)]


@settings(max_examples=20)
@given(costs)
def test_the_cost_that_made_the_points_is_found(cost: LinearCost) -> None:
    found = fit(points(cost))
    assert error_of(found, points(cost)).greatest < 1e-3
    assert found.weights_s == found.large_token_s == found.large_step_tokens == 0


@settings(max_examples=20)
@given(st.floats(2e-3, 2e-2), st.integers(2, 60), st.floats(0.0, 5e-4))
def test_steps_that_wait_for_the_weights_are_found(token_s: float, tokens: int, more_s: float) -> None:
    """The weights take as long as `tokens` tokens."""
    cost = LinearCost(0.004, token_s, 4e-7, token_s + more_s, 3e-6, weights_s=tokens * token_s)
    assert error_of(fit(points(cost)), points(cost)).greatest < 0.04


@settings(max_examples=20)
@given(st.sampled_from((0.0, 0.02)), st.sampled_from((64, 128)), st.floats(2e-4, 1e-3))
@pytest.mark.full
def test_tokens_that_take_longer_in_large_steps_are_found(weights_s: float, large: int, more_s: float) -> None:
    cost = LinearCost(0.004, 2e-3, 4e-7, 3e-3, 3e-6, weights_s=weights_s)
    cost = replace(cost, large_step_tokens=large, large_token_s=more_s)
    found = fit(points(cost))
    assert error_of(found, points(cost)).greatest < 0.02
    assert found.large_step_tokens <= large and found.large_token_s == pytest.approx(more_s, rel=0.3)


def test_a_decode_costs_at_least_its_token_where_weights_are_given() -> None:
    with pytest.raises(ValueError, match=r"decode_row_s is 0.001.*at least prefill_token_s"):
        LinearCost(0.004, 0.002, decode_row_s=0.001, weights_s=0.01)


def test_swaps_are_fitted_only_where_some_were_measured() -> None:
    cost = LinearCost(swap_byte_s=2e-9)
    assert fit(points(cost)).swap_byte_s == pytest.approx(2e-9, rel=1e-3)
    without = [point for point in points(cost) if not point.shape.swap_bytes]
    assert fit(without).swap_byte_s == LinearCost().swap_byte_s


def test_points_held_out_say_how_good_the_fit_is_and_change_nothing() -> None:
    cost = LinearCost()
    slower = [replace(p, seconds=p.seconds * (1.5 if p.held_out else 1.0)) for p in points(cost)]
    assert fit(slower) == fit(points(cost))
    error = error_of(fit(slower), [p for p in slower if p.held_out])
    assert error.median == pytest.approx(1 / 3, rel=1e-2) and error.points == len(HELD_OUT)


def test_of_no_points_there_is_no_error() -> None:
    assert error_of(LinearCost(), []) == FitError(0, 0.0, 0.0)


entries = st.one_of(st.just(0.0), st.floats(1e-3, 10.0))
rows = st.lists(st.lists(entries, min_size=3, max_size=3), min_size=4, max_size=8)


@given(rows)
def test_no_small_step_from_the_solution_is_better(found: list[list[float]]) -> None:
    """Kuhn-Tucker: the slope is 0 where a coefficient is above 0, and never downhill where it is 0."""
    matrix = np.array(found)
    wanted = np.ones(len(found))
    solution = non_negative(matrix, wanted)
    assert (solution >= 0.0).all()
    least = float(np.sum((matrix @ solution - wanted) ** 2))
    for column in range(3):
        for step in (1e-3, -1e-3):
            moved = solution.copy()
            moved[column] += step
            if moved[column] >= 0.0:
                assert float(np.sum((matrix @ moved - wanted) ** 2)) >= least - 1e-9


def test_a_shape_knows_what_stands_in_it() -> None:
    shape = Shape(((100, 20), (5, 0)), 3, 40)
    assert (shape.step_tokens, shape.kind) == (108, "mixed")
    assert Shape(((1, 0),)).kind == "prompts" and Shape((), 1, 1).kind == "decodes"
    assert set(SEEN).isdisjoint(HELD_OUT) and len(COEFFICIENTS) == 5
