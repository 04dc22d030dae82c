"""What one candidate attains, whole or one phase of it, and its closed-form bounds."""

from dataclasses import replace

import pytest

from cluster.offline.plan.deploy import Layout, WorkerGroup, case_of
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.trial import (
    FLOOR,
    Trial,
    decode_trial,
    full_trial,
    last_deadline_s,
    prefill_trial,
    prompt_latency,
)
from cluster.offline.scoring.figures import attainment
from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.compare import Case, capacity
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.arrivals import WorkloadError
from cluster.offline.workload.load import load_workload
from cluster.spec import Role
from tests.offline.plan.requests import L4, load, plan_request
from workers.request import SLO

MIXED = Layout("colocated", (WorkerGroup(Role.MIXED, L4),))


@pytest.fixture(scope="module")
def mixed() -> Trial:
    return full_trial(plan_request(), MIXED)


def test_an_idle_candidate_attains_what_each_request_would_alone(mixed: Trial) -> None:
    assert mixed.unloaded == 1.0
    assert mixed(0.01, 0).both == 1.0
    hurried = full_trial(plan_request(slo=SLO(0.075, 0.1)), MIXED)
    assert 0.0 < hurried.unloaded < 1.0
    assert hurried(0.01, 0).both == pytest.approx(hurried.unloaded, abs=0.2)  # 30 requests of the 200


def test_one_seed_draws_the_same_requests_at_every_rate() -> None:
    slow, fast = load().at(1.0, 7, 20), load().at(4.0, 7, 20)
    assert [each.prompt_tokens for each in slow.arrivals] == [each.prompt_tokens for each in fast.arrivals]
    assert [each.at_s for each in slow.arrivals] == pytest.approx([4.0 * each.at_s for each in fast.arrivals])
    assert load().at(1.0, 8, 20).arrivals != slow.arrivals


def test_own_times_keep_bursts_and_lengths_in_order() -> None:
    source = load_workload("onoff:rate=5,on=1,off=9,lengths=mixed,count=200")
    part = PlanLoad.of(source, own_times=True).at(20.0, 3, 50)
    assert part.rate == pytest.approx(20.0)
    lengths = [each.prompt_tokens for each in source.arrivals]
    taken = [each.prompt_tokens for each in part.arrivals]
    assert any(lengths[begin : begin + 50] == taken for begin in range(151))


@pytest.mark.parametrize("count", [1, 3])
def test_own_times_of_requests_that_come_at_once_are_refused(count: int) -> None:
    source = load_workload(f"burst:lengths=mixed,count={count}")
    with pytest.raises(WorkloadError, match=rf"{count} request\(s\), all at one time.*or leave --own-times out"):
        PlanLoad.of(source, own_times=True)


def test_ending_a_run_after_its_last_deadline_changes_no_attainment(mixed: Trial) -> None:
    run = mixed.run(1.5 * mixed.max_rate, 0)
    workload = mixed.load.at(1.5 * mixed.max_rate, 0, len(run.served))
    whole = simulate(mixed.case.spec, mixed.case.models, workload, RunOptions(slo=mixed.slo))
    assert attainment(run, mixed.slo).both == attainment(whole, mixed.slo).both


def test_a_run_that_is_given_up_was_below_the_target(mixed: Trial) -> None:
    hurried = replace(full_trial(plan_request(slo=SLO(0.15, 0.1)), MIXED), give_up=0.9)
    run = hurried.run(2.0 * hurried.max_rate, 0)
    assert any(each.outcome is RequestOutcome.UNFINISHED for each in run.served)
    assert replace(hurried, give_up=None)(2.0 * hurried.max_rate, 0).both < 0.9
    calm = replace(mixed, give_up=0.9)
    assert calm(0.1 * mixed.max_rate, 0) == mixed(0.1 * mixed.max_rate, 0)


def test_the_last_deadline_is_that_of_the_latest_request() -> None:
    workload = load().at(10.0, 0, 10)
    due = [each.at_s + 1.0 + 0.1 * (each.output_tokens - 1) for each in workload.arrivals]
    assert last_deadline_s(workload, SLO(1.0, 0.1)) == pytest.approx(max(due))
    assert last_deadline_s(workload, SLO(1.0, None)) is None


def test_prefill_alone_computes_prompts_and_nothing_else() -> None:
    trial = prefill_trial(plan_request(), WorkerGroup(Role.PREFILL, L4))
    run = trial.run(1.0, 0)
    assert all(each.output_tokens == 1 and each.outcome is RequestOutcome.FINISHED for each in run.served)
    assert run.workers[0].prompt_tokens == sum(each.prompt_tokens for each in run.served)


def test_decode_alone_waits_for_no_prompt() -> None:
    trial = decode_trial(plan_request(), WorkerGroup(Role.DECODE, L4))
    run = trial.run(1.0, 0)
    assert all(each.ttft_s == pytest.approx(0.0, abs=1e-6) for each in run.served)
    cost = trial.case.models["decode"].cost
    assert all(each.tpot_s >= cost.decode_seconds(1, each.prompt_tokens) * 0.999 for each in run.served if each.tpot_s)


def test_the_whole_attains_no_more_than_its_prefill_phase_alone() -> None:
    question = plan_request(slo=SLO(0.15, 0.1), requests=80)  # enough that both runs have the same
    one, two = WorkerGroup(Role.PREFILL, L4), WorkerGroup(Role.DECODE, L4)
    rate = 0.5 * prefill_trial(question, one).max_rate
    both = full_trial(question, Layout("split", (one, two)))(rate, 0)
    assert both.both <= prefill_trial(question, one)(rate, 0).ttft + 1e-9


@pytest.mark.parametrize("replicas", [1, 3])
def test_closed_forms_grow_with_the_workers(replicas: int) -> None:
    trial = full_trial(plan_request(gpus=4), MIXED.times(replicas))
    assert trial.max_rate == pytest.approx(replicas * full_trial(plan_request(), MIXED).max_rate)
    assert trial.estimate <= trial.max_rate
    assert trial.weight == replicas


def test_pools_of_one_role_add_up_in_the_capacity_of_a_cluster_file() -> None:
    case = case_of(plan_request(), Layout("split", (WorkerGroup(Role.PREFILL, L4), WorkerGroup(Role.DECODE, L4))))
    prompts, answers = case.spec.pools
    slow = replace(case.models[prompts.name], cost=case.models[prompts.name].cost.scaled(100.0))
    pools = (prompts, replace(prompts, name="slow"), answers)
    both = Case("both", replace(case.spec, pools=pools), {**case.models, "slow": slow})
    source = plan_request().load.source
    assert capacity(both, source) >= capacity(case, source)


@pytest.mark.parametrize("tokens", [400, 1500, 5000])  # in one step, and in three of different lengths
def test_a_pipeline_takes_as_long_for_a_prompt_as_the_closed_form_says(tokens: int) -> None:
    layout = Layout("colocated", (WorkerGroup(Role.MIXED, L4, 1, 2),))
    trial = full_trial(plan_request(load=load(f"{tokens}/2"), slo=SLO(5.0, 0.5)), layout)
    pool = trial.case.spec.pools[0]
    expected_s = prompt_latency(pool, trial.case.models[pool.name].cost, tokens)
    assert trial.run(0.01, 0).served[0].ttft_s == pytest.approx(expected_s, rel=0.05)


def test_short_prompts_share_a_step_in_the_closed_form_too() -> None:
    trial = full_trial(plan_request(load=load("100-200/10-20"), requests=300, slo=SLO(1.0, 0.15)), MIXED)
    assert trial(trial.estimate, 0).both >= 0.9 > trial(1.3 * trial.estimate, 0).both


def test_idle_time_between_rare_requests_is_not_simulated(mixed: Trial) -> None:
    run = mixed.run(1e-3, 0)
    assert run.served[-1].arrival_s < 10.0 * len(run.served) * FLOOR / mixed.max_rate
