"""SLOs and predictions are scored; predictions that are off by a factor correct themselves, in virtual time."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.dispatch import dispatcher as dispatcher_module
from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import Accepted, AttemptsExhausted, DeadlineExceeded, Rejected, Unservable
from cluster.observe.request_timing import RequestTiming
from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.load import load_workload
from cluster.policy.estimate.correction import Correction, Corrections
from cluster.policy.estimate.lengths import Calibration
from cluster.policy.policy import open_policy
from cluster.policy.routing.router import Placement
from cluster.policy.slo_attainment import (
    MAX_CLASSES,
    OTHER,
    OUTCOMES,
    REASONS,
    Ended,
    Errors,
    GatewayAttainment,
    SLOCount,
    SLOScores,
)
from cluster.spec import ClusterSpec
from tests.cluster.local import cluster, generate, split_spec
from tests.cluster.local import request as asked
from tests.observe.exposition import exposition
from tests.offline.sim.cases import COST, ENGINE, colocated, models, split
from tests.policy.views import Story, request, view, worker
from workers.costs import CostModel, LinearCost
from workers.engine import engine as engine_module
from workers.engine.estimate import StepEstimate
from workers.request import SLO

# ---- scores ------------------------------------------------------------------------------------------------------

MET = Ended("completed", "fast", ttft_s=1.0, tpot_s=0.05, ttft_slo_s=1.0, tpot_slo_s=0.06)


def standing(*ended: Ended) -> GatewayAttainment:
    scores = SLOScores()
    for each in ended:
        scores.ended(each)
    return scores.attainment(Calibration())


def test_an_slo_is_met_exactly_at_its_limit_and_both_only_together() -> None:
    late = replace(MET, ttft_s=1.001)
    slow = replace(MET, tpot_s=0.07)
    (score,) = standing(MET, late, slow, replace(MET, tpot_slo_s=None)).classes
    assert (score.name, score.requests) == ("fast", 4)
    assert (score.ttft, score.tpot, score.both) == (SLOCount(4, 3), SLOCount(3, 2), SLOCount(3, 1))
    assert score.ttft.share == 0.75


def test_an_unknown_outcome_is_neither_met_nor_missed() -> None:
    nothing = replace(MET, ttft_s=None, tpot_s=None)
    (score,) = standing(
        replace(nothing, outcome="cancelled", waited_s=0.5),
        replace(nothing, outcome="refused", waited_s=9.0),
        replace(nothing, outcome="deadline", waited_s=1.0),
        Ended("completed", "fast", ttft_s=1.0),
    ).classes
    assert (score.requests, score.ttft, score.tpot, score.both) == (4, SLOCount(), SLOCount(), SLOCount())


def test_a_first_token_that_never_came_misses_its_slo_once_it_is_due() -> None:
    nothing = replace(MET, ttft_s=None, tpot_s=None)
    (score,) = standing(
        replace(nothing, outcome="cancelled", waited_s=1.5),
        replace(nothing, outcome="deadline", waited_s=1.5),
        replace(nothing, outcome="failed", waited_s=0.1),
    ).classes
    assert score.ttft == SLOCount(3, 0)


def test_errors_are_relative_signed_and_of_the_latest_only() -> None:
    result = [replace(MET, after_placement_s=1 + n / 100, predicted_ttft_s=1.0) for n in range(600)]
    (score,) = standing(*result, replace(MET, after_placement_s=None), replace(MET, predicted_ttft_s=0.0)).classes
    assert score.tpot_errors is None
    assert score.ttft_errors is not None
    assert score.ttft_errors.p10 == pytest.approx(0.88 + 51.1 / 100, abs=0.01), "the first 88 are forgotten"
    assert score.ttft_errors.p90 == pytest.approx(5.99 - 51.1 / 100, abs=0.01)
    fast = standing(replace(MET, tpot_s=0.02, predicted_tpot_s=0.08)).classes[0].tpot_errors
    assert fast == Errors(-0.75, -0.75, -0.75)


NUMBER = st.none() | st.floats(0.0, 1e9) | st.just(math.inf)
ENDED = st.builds(
    Ended, st.sampled_from(OUTCOMES), st.text(max_size=3), st.text(max_size=3), *([NUMBER] * 3), st.floats(0, 1e9),
    *([NUMBER] * 4),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(ENDED, max_size=150))
def test_counts_add_up_and_labels_are_bounded(ended: list[Ended]) -> None:
    result = standing(*ended)
    assert sum(count for _, count in result.outcomes) == sum(score.requests for score in result.classes) == len(ended)
    assert dict(result.refused).keys() == set(REASONS)
    assert sum(dict(result.refused).values()) == dict(result.outcomes)["refused"]
    assert len(result.classes) <= MAX_CLASSES
    for score in result.classes:
        assert all(0 <= kept.kept <= kept.settled <= score.requests for kept in (score.ttft, score.tpot, score.both))
        assert score.both.settled <= min(score.ttft.settled, score.tpot.settled)
    assert exposition(result, "g").count("\n") < 500 + 6 * len(result.classes)


def test_metrics_count_migrations_and_role_changes() -> None:
    moves = ("requeue", "moved", 4), ("role", "stayed", 1)
    result = replace(standing(), moves=moves, moved_bytes=5000, role_changes=(("decode", "prefill", 2),))
    result = replace(result, dropped_hashes=(("disk", 7),))
    lines = exposition(result, "g").splitlines()
    for line in (
        'diptych_migrations_total{gateway="g",outcome="moved",reason="requeue"} 4.0',
        'diptych_migrations_total{gateway="g",outcome="stayed",reason="role"} 1.0',
        'diptych_migrated_bytes_total{gateway="g"} 5000.0',
        'diptych_role_changes_total{from="decode",gateway="g",to="prefill"} 2.0',
        'diptych_prefix_index_dropped_total{gateway="g",tier="disk"} 7.0',
    ):
        assert line in lines
    assert not any("elastic_decisions" in line for line in lines), "no elastic policy"


def test_classes_beyond_the_limit_count_as_other() -> None:
    result = standing(*(Ended("completed", f"class {n:03}") for n in range(100)))
    assert len(result.classes) == MAX_CLASSES
    assert {score.name: score.requests for score in result.classes}[OTHER] == 100 - (MAX_CLASSES - 1)


def test_metrics_are_what_the_scores_say() -> None:
    result = standing(
        replace(MET, after_placement_s=1.1, predicted_ttft_s=1.0),
        Ended("refused", "fast", "queue-full"),
        Ended("refused", "fast", "of another version"),
        Ended("cancelled", 'odd " \n name'),
    )
    lines = exposition(result, "gateway-0").splitlines()
    for line in (
        'diptych_slo_requests_total{attained="yes",class="fast",gateway="gateway-0",kind="both"} 1.0',
        'diptych_slo_requests_total{attained="no",class="fast",gateway="gateway-0",kind="ttft"} 0.0',
        'diptych_requests_total{gateway="gateway-0",outcome="refused"} 2.0',
        'diptych_refused_total{gateway="gateway-0",reason="queue-full"} 1.0',
        'diptych_refused_total{gateway="gateway-0",reason="other"} 1.0',
        'diptych_prediction_error_ratio_bucket{gateway="gateway-0",kind="ttft",le="1.05"} 0.0',
        'diptych_prediction_error_ratio_bucket{gateway="gateway-0",kind="ttft",le="1.25"} 1.0',
        'diptych_prediction_error_ratio_count{gateway="gateway-0",kind="ttft"} 1.0',
        'diptych_prediction_error_ratio_sum{gateway="gateway-0",kind="ttft"} 1.1',
    ):
        assert line in lines, line


# ---- the course of a request -------------------------------------------------------------------------------------


def test_a_prediction_is_compared_with_the_time_since_the_placement() -> None:
    timing = RequestTiming(arrived_s=10.0)
    timing.placed(Placement("p", "d", "", predicted_ttft_s=3.5, predicted_tpot_s=0.1), now_s=12.0)
    timing.tokens(1, [14.0])
    timing.placed(Placement("p", "d", "again", predicted_ttft_s=99.0), now_s=15.0)
    timing.tokens(2, [15.0])
    ended = timing.ended(SLO(4.0, 0.4, "fast"), None, 16.0)
    assert (ended.outcome, ended.class_name, ended.ttft_s, ended.tpot_s) == ("completed", "fast", 4.0, 0.5)
    assert (ended.after_placement_s, ended.predicted_ttft_s, ended.predicted_tpot_s) == (2.0, 1.5, 0.1)
    assert (ended.is_met("ttft"), ended.is_met("tpot")) == (True, False)
    assert ended.error("ttft") == pytest.approx(1 / 3) and ended.error("tpot") == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("error", "outcome", "refusal"),
    [
        (Rejected("no", 1.0, "no-room"), "refused", "no-room"),
        (DeadlineExceeded("prefill"), "deadline", ""),
        (AttemptsExhausted("six"), "failed", ""),
        (Unservable("long"), "invalid", ""),
        (GeneratorExit(), "cancelled", ""),
        (ValueError("a bug"), "failed", ""),
    ],
)
def test_every_outcome_has_its_name(error: BaseException, outcome: str, refusal: str) -> None:
    ended = RequestTiming(1.0).ended(SLO(ttft_s=1.0), error, 3.0)
    assert (ended.outcome, ended.refusal, ended.waited_s, ended.ttft_s) == (outcome, refusal, 2.0, None)


# ---- corrections -------------------------------------------------------------------------------------------------


def test_a_correction_goes_to_the_true_ratio_and_is_bounded() -> None:
    found = Corrections()
    for n in range(100):
        found.learn("w", measured_s=0.3 if n % 2 else 1.2, predicted_s=0.2 if n % 2 else 0.8, now_s=n)
        assert found.ratio("w", n) <= 1.5 + 1e-9
    assert found.ratio("w", 100.0) == pytest.approx(1.5, rel=0.02) and found.ratio("x", 100.0) == 1.0
    for n in range(500):
        found.learn("w", 1e9, 1e-3, 100.0 + n)
    assert found.ratio("w", 600.0) == 100.0


def test_one_stall_counts_little_and_prompts_of_one_step_share_its_time() -> None:
    given_costs = Correction(prior_s=4.0)
    for n in range(20):
        given_costs.learn(1.0, 1.0, float(n))
    given_costs.learn(600.0, 1.0, 21.0)
    assert given_costs.at(21.0) < 1.2, "ten minutes for a second's work count as four seconds"
    together = Correction(prior_s=4.0)
    for n in range(10):
        for part in range(5):
            together.learn(0.0 if part else 2.5, 0.5, float(n))
        assert together.at(float(n)) == pytest.approx(1.0)


def test_the_correction_of_a_slow_worker_fades_without_samples() -> None:
    slow, fast = Correction(1.0), Correction(1.0)
    for _ in range(2000):
        slow.learn(8.0, 1.0, 100.0)
        fast.learn(1.0, 8.0, 100.0)
    assert [slow.at(now_s) for now_s in (160.0, 220.0, 1e9)] == pytest.approx([8.0, 4.5, 1.0])
    assert fast.at(1e9) == pytest.approx(0.125)
    times = (100.0, 160.0, 165.0, 220.0, 1e9)
    assert [slow.rounded(now_s) for now_s in times] == [8.0, 8.0, 7.61, 4.5, 1.0]
    assert fast.rounded(160.0) == round(0.125, 2)


@pytest.mark.parametrize(("compute_s", "corrected"), [(0.1, 1.0), (None, 4.0)])
def test_a_prompt_that_waited_for_memory_is_no_sample_of_speed(compute_s: float | None, corrected: float) -> None:
    story, picture = Story("least-loaded"), view(worker("p0"), worker("d0"))
    for n in range(200):  # of a tenth of a second each, four tenths behind the moment that they are sent
        wanted = request(f"r{n}", length=100)
        story.send(picture, wanted)
        story.now_s += 5.0
        story.policy.active.reserved(wanted.key, story.now_s)
        story.now_s += 0.4
        story.policy.prefilled(wanted.key, story.now_s, compute_s=compute_s)
        story.ended(wanted)
    result = story.choose(picture, request())
    assert isinstance(result, Placement) and result.predicted_ttft_s == pytest.approx(0.1 * corrected, rel=0.03)


def test_default_costs_give_predictions_once_both_engines_have_learned_of_their_steps() -> None:
    story, default = Story("least-loaded", cost=None), LinearCost()
    fresh = view(worker("p0", steps=3, prompt_ratio=0.5), worker("d0"))
    assert story.send(fresh, request("a", length=100)).predicted_ttft_s is None, "the decode worker ran no step"
    story.ended(request("a", length=100))
    learned = view(worker("p0", steps=3, prompt_ratio=0.5), worker("d0", steps=3, decode_ratio=0.25))
    result = story.send(learned, request("b", length=100))
    assert result.predicted_ttft_s == pytest.approx(0.5 * default.prefill_seconds(100))
    assert result.predicted_tpot_s == pytest.approx(0.25 * default.decode_seconds(1, 100), rel=0.05)


@contextmanager
def believing(patch: pytest.MonkeyPatch, cost: CostModel | None) -> Iterator[list[Dispatcher]]:
    """Gateways that take this for what steps cost, whatever they do cost."""
    opened: list[Dispatcher] = []
    build = Dispatcher.__init__

    def remembered(self: Dispatcher, *args: object, **options: object) -> None:
        build(self, *args, **options)  # type: ignore[arg-type]
        opened.append(self)

    def deluded(spec: ClusterSpec, seed: int) -> object:
        return open_policy(replace(spec, pools=tuple(replace(pool, cost=cost) for pool in spec.pools)), seed)

    patch.setattr(Dispatcher, "__init__", remembered)
    patch.setattr(dispatcher_module, "open_policy", deluded)
    yield opened


@pytest.mark.grid(keep=1)
@pytest.mark.parametrize(
    ("whole", "true_ratio", "routing"),
    [
        pytest.param(split(2, 2), 1.5, "least-loaded", id="split"),
        pytest.param(split(2, 2), 0.6, "slo", id="split, faster"),
        pytest.param(colocated(3), 1.5, "slo", id="colocated"),
    ],
)
def test_costs_that_are_off_by_a_factor_are_corrected(
    whole: ClusterSpec, true_ratio: float, routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(whole, gateway=replace(whole.gateway, routing=routing))
    with believing(monkeypatch, COST.scaled(1 / true_ratio)) as opened:
        simulate(spec, models(spec), load_workload("poisson:rate=3,count=120,lengths=mixed", seed=5))
    (dispatcher,) = opened
    known = dispatcher._slo_scores._classes["default"].errors
    for kind in ("ttft", "tpot"):
        errors = list(known[kind])
        assert len(errors) == 120
        assert abs(median(errors[:4])) > 0.2, f"{kind}: at first they are believed"
        assert abs(median(errors[-60:])) < 0.1, f"{kind}: {median(errors[-60:]):+.2f} is left"


def test_without_costs_a_faster_machine_refuses_nobody_that_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = colocated(1, engine=replace(ENGINE, max_running=64, batching="adaptive", kv_blocks=1152))
    spec = replace(spec, gateway=replace(spec.gateway, routing="slo", admission="slo"))
    monkeypatch.setattr(engine_module, "StepEstimate", lambda _, block_bytes: StepEstimate(LinearCost(), block_bytes))
    fast = models(spec, LinearCost().scaled(0.15))
    load = load_workload("poisson:rate=3,count=40,lengths=7x64-128/192-320+1024/48", seed=1)
    with believing(monkeypatch, None):
        run = simulate(spec, fast, load, RunOptions(slo=SLO(ttft_s=5.0, tpot_s=0.06)))
    refused = [served.detail for served in run.served if served.outcome is not RequestOutcome.FINISHED]
    assert not refused


# ---- through a dispatcher ----------------------------------------------------------------------------------------


async def test_requests_are_scored_by_class_and_slo() -> None:
    spec = split_spec()
    async with cluster(replace(spec, gateway=replace(spec.gateway, slo=SLO(tpot_s=30.0)))) as subject:
        easy, hard = SLO(60.0, 60.0, "easy"), SLO(1e-9, 60.0, "hard")
        for n, slo in enumerate([easy, easy, hard, SLO()]):
            await subject.run(replace(asked(f"r{n}"), slo=slo))
        with pytest.raises(Unservable):
            await subject.run(asked("long", 100_000))
        result = subject.dispatcher.slo_attainment()
    scores = {score.name: score for score in result.classes}
    assert (scores["easy"].both, scores["hard"].both) == (SLOCount(2, 2), SLOCount(1, 0))
    assert (scores["default"].ttft, scores["default"].tpot) == (SLOCount(), SLOCount(1, 1)), "the gateway's own SLO"
    assert {name: count for name, count in result.outcomes if count} == {"completed": 4, "invalid": 1}


@pytest.mark.parametrize("routing", ["least-loaded", "slo"])
async def test_clients_get_predictions_once_there_are_samples(routing: str) -> None:
    spec = split_spec()
    async with cluster(replace(spec, gateway=replace(spec.gateway, routing=routing))) as subject:
        result = [(await subject.run(asked(f"r{n}", 60, max_tokens=20)))[0] for n in range(4)]
    accepted = [each for each in result if isinstance(each, Accepted)]
    assert [each.predicted_ttft_s is None for each in accepted] == [True, False, False, False]
    assert [each.predicted_tpot_s is None for each in accepted] == [True, False, False, False]


async def test_refused_and_cancelled_requests_are_counted_separately() -> None:
    spec = split_spec()
    gateway = replace(spec.gateway, admission="predictive", slo=SLO(ttft_s=1e-9))
    async with cluster(replace(spec, gateway=gateway)) as subject:
        with pytest.raises(Rejected):
            await subject.run(asked("no"))
        events = generate(subject.dispatcher, replace(asked("left", max_tokens=90), slo=SLO(60.0, 60.0)))
        await anext(events)
        await events.aclose()
        await subject.settle()
        result = subject.dispatcher.slo_attainment()
    assert {name: count for name, count in result.refused if count} == {"admission": 1}
    assert {name: count for name, count in result.outcomes if count} == {"refused": 1, "cancelled": 1}
