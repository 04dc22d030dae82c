"""Closed forms agree with a simulation without queueing."""

import subprocess
import sys
from dataclasses import replace

import pytest

from cluster.offline.plan.deploy import Layout
from cluster.offline.plan.estimate import estimate, median_and_p99, outline, thinned
from cluster.offline.plan.layouts import instances
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.report import lines_of
from cluster.offline.plan.trial import Trial, full_trial
from cluster.offline.workload.load import load_workload
from tests.offline.plan.requests import plan_request
from workers.request import SLO


def trial(**changed: object) -> Trial:
    question = plan_request(gpus=1, **changed)
    return full_trial(question, Layout("colocated", (instances(question)[0],)))


def test_alone_latencies_are_those_of_an_idle_simulation() -> None:
    fixed = PlanLoad.of(load_workload("poisson:rate=4,lengths=600/15,count=40"))
    one = trial(load=fixed)
    found = estimate(plan_request(load=fixed), one, median_and_p99(fixed))
    (served, *_) = replace(one, load=fixed, requests=10).run(0.01, 0).served
    assert found.ttft_s[0] == pytest.approx(served.ttft_s, rel=1e-3)
    assert found.tpot_s[0] == pytest.approx(served.tpot_s, rel=1e-2)
    assert found.at_once == found.kv_tokens // 624  # 615 tokens are 39 blocks


def test_a_rate_is_estimated_only_where_the_slo_can_be_met() -> None:
    ends = ((200, 5), (600, 15))
    question = plan_request()
    assert estimate(question, trial(), ends).rate > 0.0
    slow = estimate(question, trial(slo=SLO(0.4, 0.001)), ends)
    assert slow.rate == 0.0 and "TPOT" in slow.throughput and "the SLO is 1 ms" in slow.throughput
    late = estimate(question, trial(slo=SLO(0.001, 0.1)), ends)
    assert late.rate == 0.0 and "TTFT" in late.broken


def test_an_outline_has_the_best_colocated_and_the_best_split_layout() -> None:
    question = plan_request(gpus=2)
    found = outline(question).estimates
    assert [each.layout.kind for each in found] == ["colocated", "split"]
    assert all(0 < each.gpus <= 2 and each.rate > 0.0 for each in found)


def test_an_outline_for_a_rate_has_as_many_gpus_as_the_rate_needs() -> None:
    one = trial().estimate
    found = {each.layout.kind: each for each in outline(plan_request(gpus=8, rate=2.5 * one)).estimates}
    assert 3 <= found["colocated"].gpus <= 4 and 3 <= found["split"].gpus <= 4
    assert all(each.rate >= 2.5 * one for each in found.values())


def test_a_large_load_is_thinned_to_what_a_closed_form_needs() -> None:
    load = PlanLoad.of(load_workload("poisson:rate=4,lengths=200-600/5-15,count=3000"))
    few = thinned(load)
    assert len(few.arrivals) <= 128
    assert few.arrivals[0] == load.arrivals[0]


def test_every_kind_of_gpu_has_its_own_estimate() -> None:
    found = outline(plan_request(hardware=("l4", "h100-80gb"), gpus=2))
    kinds = [{group.hardware for group in each.layout.groups} for each in found.estimates]
    assert {"l4"} in kinds and {"h100-80gb"} in kinds


def test_a_kind_that_cannot_meet_the_slo_says_why() -> None:
    (found,) = outline(plan_request(slo=SLO(0.4, 0.001))).estimates
    assert found.rate == 0.0 and "TPOT" in found.broken


def test_closed_forms_load_no_simulator() -> None:
    probe = (
        "import sys, cluster.cli.plan, cluster.offline.plan.report, cluster.offline.workload.load;"
        "heavy = ('numpy', 'torch', 'ray', 'grpc', 'cluster.dispatch.dispatcher', 'workers.engine.engine');"
        "print([name for name in heavy if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_of_colocated_layouts_that_are_estimated_alike_the_smallest_is_named() -> None:
    """Eight pipeline stages have an edge over two that closed forms cannot tell from none."""
    load = PlanLoad.of(load_workload("poisson:rate=4,lengths=4000-8000/20-100,count=100"))
    found = outline(plan_request(hardware=("a100-80gb",), gpus=8, load=load, slo=SLO(2.0, 0.1))).estimates
    (colocated,) = [each for each in found if each.layout.kind == "colocated"]
    (group,) = colocated.layout.groups
    assert group.gpus_each == 2


def test_where_no_layout_meets_tpot_the_fastest_instance_is_named() -> None:
    (found,) = outline(plan_request(hardware=("h100-80gb",), gpus=8, slo=SLO(1.0, 0.001))).estimates
    (group,) = found.layout.groups
    assert found.rate == 0.0 and group.tensor > 1 and group.pipeline == 1


def test_an_estimate_below_the_wanted_rate_says_so() -> None:
    question = plan_request(gpus=1, rate=1000.0)
    lines = lines_of(question, estimate(question, trial(), ((200, 5), (600, 15))))
    assert any(line.endswith("too few: 1000 are wanted") for line in lines)
