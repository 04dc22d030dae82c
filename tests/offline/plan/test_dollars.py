"""Prices, and what a rate costs."""

import json
from pathlib import Path

import pytest

from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.dollars import parse_prices, price_line, serving_cost
from cluster.offline.plan.request import PlanError
from cluster.spec import Role
from tests.offline.plan.requests import H100, L4, load, plan_request

TWO = Layout("colocated", (WorkerGroup(Role.MIXED, L4, replicas=2),))


def test_dollars_follow_from_the_prices_and_the_rate() -> None:
    question = plan_request(load=load("400/10"), prices={L4: 0.9})
    found = serving_cost(question, TWO, 5.0)
    assert found is not None
    assert found.dollars_h == pytest.approx(1.8)
    assert found.requests_s_per_dollar_h == pytest.approx(5.0 / 1.8)
    assert found.dollars_per_million_output_tokens == pytest.approx(1.8 / 3600 / 50 * 1e6)
    assert found.dollars_per_million_tokens == pytest.approx(1.8 / 3600 / 2050 * 1e6)


def test_without_a_price_or_a_rate_there_is_no_cost() -> None:
    assert serving_cost(plan_request(), TWO, 0.0) is None
    unpriced = Layout("colocated", (WorkerGroup(Role.MIXED, "l20"),))
    assert serving_cost(plan_request(hardware=("l20",)), unpriced, 1.0) is None


def test_a_given_price_replaces_the_dated_one() -> None:
    assert "2026-" in price_line(plan_request().sheets, {})
    assert "$0.4/h (given)" in price_line(plan_request().sheets, {L4: 0.4})
    assert "l20 not known" in price_line(plan_request(hardware=("l20",)).sheets, {})


def test_prices_come_from_words_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({L4: 0.6, "b200": 7.0}))
    assert parse_prices([str(file), f"{H100}=2.5"], [L4, H100]) == {L4: 0.6, H100: 2.5}
    with pytest.raises(PlanError, match="--price is"):
        parse_prices([str(tmp_path / "none.json")], [L4])
    file.write_text(json.dumps([1]))
    with pytest.raises(PlanError, match="a JSON file of "):
        parse_prices([str(file)], [L4])
    with pytest.raises(PlanError, match=f"h100, which is none of {L4}"):
        parse_prices(["h100=2"], [L4])
