"""What one candidate attains, whole or a phase of it, and what is known of it without simulation."""

from dataclasses import replace

import pytest

from cluster.offline.plan.deploy import Layout, WorkerGroup, case_of
from cluster.offline.plan.load import PlanLoad
from cluster.offline.plan.trial import Trial, decode, prefill, promised_end_s, trial_of, whole
from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.compare import Case, capacity
from cluster.offline.workload.load import load_workload
from cluster.spec import Role
from tests.offline.plan.asking import L4, asked, load
from workers.request import SLO

MIXED = Layout("colocated", (WorkerGroup(Role.MIXED, L4),))


@pytest.fixture(scope="module")
def mixed() -> Trial:
    return whole(asked(), MIXED)


def test_idle_it_attains_what_each_request_alone_would(mixed: Trial) -> None:
    assert mixed.alone == 1.0
    assert mixed(0.01, 0).both == 1.0
    hurried = whole(asked(slo=SLO(0.075, 0.1)), MIXED)
    assert 0.0 < hurried.alone < 1.0
    assert hurried(0.01, 0).both == pytest.approx(hurried.alone, abs=0.2)  # 30 requests of the 200


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


def test_ending_a_run_that_nobody_can_save_changes_no_attainment(mixed: Trial) -> None:
    rate = 1.5 * mixed.most
    assert mixed(rate, 0).both == replace(mixed, cut=False)(rate, 0).both


def test_a_run_that_is_given_up_was_below_the_target(mixed: Trial) -> None:
    hurried = replace(whole(asked(slo=SLO(0.15, 0.1)), MIXED), give_up=0.9)
    run = hurried.run(2.0 * hurried.most, 0)
    assert any(each.ending is RequestOutcome.UNFINISHED for each in run.served)
    assert replace(hurried, give_up=None)(2.0 * hurried.most, 0).both < 0.9
    kept = replace(mixed, give_up=0.9)
    assert kept(0.1 * mixed.most, 0) == mixed(0.1 * mixed.most, 0)


def test_after_the_last_promise_is_due_nothing_counts() -> None:
    workload = load().at(10.0, 0, 10)
    due = [each.at_s + 1.0 + 0.1 * (each.output_tokens - 1) for each in workload.arrivals]
    assert promised_end_s(workload, SLO(1.0, 0.1)) == pytest.approx(max(due))
    assert promised_end_s(workload, SLO(1.0, None)) is None


def test_prefill_alone_computes_prompts_and_nothing_else() -> None:
    trial = prefill(asked(), WorkerGroup(Role.PREFILL, L4))
    run = trial.run(1.0, 0)
    assert all(each.output_tokens == 1 and each.ending is RequestOutcome.FINISHED for each in run.served)
    assert run.workers[0].prompt_tokens == sum(each.prompt_tokens for each in run.served)


def test_decode_alone_waits_for_no_prompt() -> None:
    trial = decode(asked(), WorkerGroup(Role.DECODE, L4))
    run = trial.run(1.0, 0)
    assert all(each.ttft_s == pytest.approx(0.0, abs=1e-6) for each in run.served)
    cost = trial.case.models["decode"].cost
    assert all(each.tpot_s >= cost.decode_seconds(1, each.prompt_tokens) * 0.999 for each in run.served if each.tpot_s)


def test_the_whole_attains_no_more_than_its_prefill_phase_alone() -> None:
    question = asked(slo=SLO(0.15, 0.1), requests=80)  # so many that both runs have the same
    one, two = WorkerGroup(Role.PREFILL, L4), WorkerGroup(Role.DECODE, L4)
    rate = 0.5 * prefill(question, one).most
    both = whole(question, Layout("split", (one, two)))(rate, 0)
    assert both.both <= prefill(question, one)(rate, 0).ttft + 1e-9


@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_known_of_it_grows_with_its_workers(replicas: int) -> None:
    trial = whole(asked(gpus=4), MIXED.times(replicas))
    assert trial.most == pytest.approx(replicas * whole(asked(), MIXED).most)
    assert trial.estimate <= trial.most
    assert trial.weight == replicas


def test_unlike_pools_of_one_role_serve_together() -> None:
    """In a cluster file there may be several; a quick pool is not held back by a slow one."""
    case = case_of(asked(), Layout("split", (WorkerGroup(Role.PREFILL, L4), WorkerGroup(Role.DECODE, L4))))
    prompts, answers = case.spec.pools
    slow = replace(case.models[prompts.name], cost=case.models[prompts.name].cost.scaled(100.0))
    pools = (prompts, replace(prompts, name="slow"), answers)
    both = Case("both", replace(case.spec, pools=pools), {**case.models, "slow": slow})
    question = asked()
    one, two = (trial_of(question, each, Layout(each.name, ())) for each in (case, both))
    assert one.most <= two.most and one.estimate <= two.estimate and two.alone == one.alone == 1.0
    assert capacity(both, question.load.source) >= capacity(case, question.load.source)
    mixed = replace(case.spec, pools=(replace(prompts, role=Role.MIXED), replace(pools[1], role=Role.MIXED)))
    quick = replace(mixed, pools=mixed.pools[:1])
    alone = trial_of(question, replace(both, spec=quick), Layout("quick", ()))
    shared = trial_of(question, replace(both, spec=mixed), Layout("mixed", ()))
    assert alone.most < shared.most <= 1.02 * alone.most and alone.alone == shared.alone
