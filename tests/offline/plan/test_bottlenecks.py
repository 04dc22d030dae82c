"""What binds a phase, and what a change would bring."""

import pytest

from cluster.offline.plan.bottlenecks import bottlenecks, changes, margins
from cluster.offline.plan.deploy import Layout, WorkerGroup
from cluster.offline.plan.request import PlanRequest
from cluster.offline.plan.trial import full_trial
from cluster.spec import Role
from tests.offline.plan.requests import H100, L4, load, plan_request
from workers.request import SLO

MIXED = Layout("colocated", (WorkerGroup(Role.MIXED, L4, batch_tokens=512),))
SPLIT = Layout("split", (WorkerGroup(Role.PREFILL, L4), WorkerGroup(Role.DECODE, L4)))


def limits(question: PlanRequest, layout: Layout) -> dict[str, str]:
    return {each.phase: each.limit for each in bottlenecks(question, full_trial(question, layout))}


def test_long_prompts_are_bound_by_compute_and_decodes_by_bandwidth() -> None:
    found = limits(plan_request(load=load("2000/200")), MIXED)
    assert found["prefill"] == "compute"
    assert found["decode"] in ("bandwidth", "memory")


def test_a_batch_that_kv_limits_is_bound_by_memory() -> None:
    question = plan_request(load=load("4000/400"), slo=SLO(10.0, 1.0))
    (bottleneck,) = [each for each in bottlenecks(question, full_trial(question, MIXED)) if each.phase == "decode"]
    assert bottleneck.limit == "memory" and "KV memory" in bottleneck.words


def test_a_batch_that_tpot_limits_says_so() -> None:
    question = plan_request(load=load("100/50"), slo=SLO(1.0, 0.0665))
    (bottleneck,) = [each for each in bottlenecks(question, full_trial(question, MIXED)) if each.phase == "decode"]
    assert "limited by TPOT" in bottleneck.words


def test_a_small_model_on_a_fast_gpu_is_bound_by_launches() -> None:
    layout = Layout("colocated", (WorkerGroup(Role.MIXED, H100, tensor=8),))
    question = plan_request(hardware=(H100,), gpus=8, load=load("100/50"))
    assert limits(question, layout)["decode"] == "launches"


def test_only_a_split_has_a_handoff_and_a_slow_link_binds_it() -> None:
    question = plan_request(load=load("2000/200"))
    assert "handoff" not in limits(question, MIXED)
    trial = full_trial(question, SPLIT)
    (handoff,) = [each for each in bottlenecks(question, trial) if each.phase == "handoff"]
    assert handoff.limit == "none" and "MB" in handoff.words


def test_margins_are_shares_of_the_slo() -> None:
    question = plan_request(slo=SLO(1.0, 0.1))
    assert margins(full_trial(question, MIXED), (0.1, 0.25)).startswith("TTFT without load is 25% of its SLO, TPOT")


def test_one_more_gpu_brings_its_share_and_a_looser_promise_never_less() -> None:
    question = plan_request(gpus=4)
    found = {each.words: each for each in changes(question, MIXED)}
    assert found["1 more GPU for mixed"].gain == pytest.approx(1.0)
    assert found["1 more GPU for mixed"].gpus == 2
    assert found["TTFT <= 0.6 s"].gain >= 0.0
    assert found["TPOT <= 0.15 s"].gain >= 0.0
    assert not any(words.startswith("TP2") for words in found)  # one GPU holds no two ranks
    two = {each.words for each in changes(question, MIXED.times(2))}
    assert "TP2 for mixed, on as many GPUs" in two
