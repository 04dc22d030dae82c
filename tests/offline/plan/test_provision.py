"""Splitwise's provisioning: the border that is walked, and what it finds."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.plan.asked import PlanError
from cluster.offline.plan.provision import Design, Reference, as_json, border, designs, provision, told_of
from cluster.offline.scoring.goodput import TimeUp
from tests.offline.plan.asking import A100, H100, asked, load

HCAP = "h100-80gb-pcap"


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=6), st.integers(2, 10))
def test_the_walked_border_is_the_exhaustive_one(corners: list[tuple[int, int]], most: int) -> None:
    """Whatever has at least as many of both as some corner will do."""
    asks = 0

    def will_do(prompts: int, tokens: int) -> bool:
        nonlocal asks
        asks += 1
        return any(prompts >= p and tokens >= t for p, t in corners)

    found = border(will_do, most)
    asked_in_walk = asks
    all_ = [(p, t) for p in range(1, most) for t in range(1, most) if p + t <= most and will_do(p, t)]
    minimal = [(p, t) for p, t in all_ if not any(q <= p and u <= t and (q, u) != (p, t) for q, u in all_)]
    assert sorted(found) == sorted(minimal)
    assert asked_in_walk <= 2 * most


def test_designs_are_pairs_of_kinds_without_capped_prompts() -> None:
    assert [design.name for design in designs((A100, H100))] == ["AA", "AH", "HA", "HH"]
    assert [design.name for design in designs((H100, HCAP))] == ["HH", "HHcap"]


def test_the_reference_is_splitwises_table() -> None:
    ttft_s, tbt_s = Reference("llama-2-70b")(1500, 13)
    assert ttft_s == pytest.approx(0.185, rel=0.2)  # the paper's median of the coding trace on A100
    assert tbt_s == pytest.approx(0.045, rel=0.2)


def question(**changed: object) -> object:
    terms = {"model": "llama-2-70b", "hardware": (A100, H100), "gpus": 32, "source": "splitwise", "requests": 12}
    return asked(**(terms | {"load": load("1000-1500/3-5")} | changed))


def test_the_cheapest_machines_for_a_rate_come_first() -> None:
    found = provision(question(rate=0.2, objective="cost"), 3)
    weights = [point.weight for point in found.points]
    assert weights == sorted(weights)
    assert found.points[0].design == Design(A100, A100)  # cheapest, and fast enough when hardly anybody asks
    assert (found.points[0].prompts, found.points[0].tokens) == (1, 1)
    assert weights[0] == pytest.approx(2 * 8 * 2.21)


def test_when_the_time_is_up_what_serves_the_rate_so_far_is_the_answer() -> None:
    left = 3  # one point judged with its one seed, and two more

    def each(work: Callable[..., Any], *arguments: Any) -> list[Any]:
        nonlocal left
        pairs = list(zip(*arguments, strict=True))
        if len(pairs) > left:
            raise TimeUp
        left -= len(pairs)
        return [work(*one) for one in pairs]

    terms = question(rate=0.2, objective="cost")
    found = provision(terms, 3, each)
    assert not found.complete and found.points
    assert as_json(terms, found)["complete"] is False


def test_power_and_cost_are_different_questions() -> None:
    by_power = provision(question(rate=0.2, objective="power"), 2).points
    assert by_power[0].weight == pytest.approx(2 * 8 * 812.5)
    value = as_json(question(rate=0.2, objective="power"), provision(question(rate=0.2, objective="power"), 2))
    assert value["points"][0]["unit"] == "W"


def test_a_rate_that_no_design_serves_names_the_bounds_that_break() -> None:
    with pytest.raises(PlanError, match=r"no design on 2 machines keeps the nine bounds.*TTFT P"):
        provision(question(rate=60.0, hardware=(A100,), requests=40), 2)


def test_what_serves_most_for_the_same_weight() -> None:
    terms = question(objective="throughput", hardware=(A100,), tolerance=0.5)
    found = provision(terms, 3)
    assert {(point.prompts, point.tokens) for point in found.points} <= {(1, 2), (2, 1)}
    assert found.rates[0] == max(found.rates) > 0.0
    assert any("requests/s" in line for line in told_of(terms, found))
