"""Two clusters against each other."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.offline.plan.deploy import Layout, WorkerGroup, case_of
from cluster.offline.plan.whatif import WhatIfTerms, against, as_json, rows, told
from cluster.offline.scoring.goodput import TimeUp
from cluster.spec import Role
from tests.offline.plan.asking import L4, asked, load
from workers.request import SLO

TERMS = WhatIfTerms(load(), SLO(0.4, 0.1), rate=2.0, requests=24, seeds=(0, 1), tolerance=0.2)
ONE = case_of(asked(), Layout("colocated", (WorkerGroup(Role.MIXED, L4),)))
TWO = case_of(asked(), Layout("colocated", (WorkerGroup(Role.MIXED, L4, replicas=2),)))


def test_a_cluster_differs_from_itself_by_nothing() -> None:
    left, right = against(ONE, ONE, TERMS)
    assert all(row.difference.mean == 0.0 and not row.difference.is_sure for row in rows(left, right))
    assert told(left, right, TERMS)[1].startswith("no sure difference")


@pytest.mark.full
def test_twice_the_workers_serve_more() -> None:
    left, right = against(ONE, TWO, TERMS)
    by_name = {row.name: row for row in rows(left, right)}
    assert by_name["goodput"].right > 1.5 * by_name["goodput"].left
    assert by_name["TTFT p90"].difference.mean <= 0.0
    assert {"attainment", "TPOT p99", "E2E p50"} <= set(by_name)
    value = as_json(left, right, TERMS)
    assert value["gpus"] == [1, 2]
    assert value["rows"][0]["difference"] == pytest.approx(by_name["goodput"].difference.mean)


@pytest.mark.parametrize("runs", [0, 3, 6])
def test_when_the_time_is_up_neither_is_called_better(runs: int) -> None:
    left = runs

    def each(work: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        nonlocal left
        for one in zip(*arguments, strict=True):
            if left <= 0:
                raise TimeUp
            left -= 1
            yield work(*one)

    one, two = against(ONE, TWO, TERMS, each)
    assert told(one, two, TERMS)[1].startswith("not decided in time")
    assert as_json(one, two, TERMS)["complete"] is False
