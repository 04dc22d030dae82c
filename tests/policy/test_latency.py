"""Predicted times of prompts beside decodes with a TPOT SLO: by hand, and against engines."""

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.dispatch import dispatcher as dispatcher_module
from cluster.dispatch.dispatcher import Dispatcher
from cluster.offline.sim.run import simulate
from cluster.offline.workload.load import load_workload
from cluster.policy.active_requests import ActiveRequests
from cluster.policy.admission.queue import RequestQueue
from cluster.policy.estimate.latency import Decodes, LatencyPredictor
from cluster.policy.routing.router import Placement
from cluster.spec import ClusterSpec, GatewaySpec, PoolSpec, Role
from tests.offline.sim.cases import COST, ENGINE, colocated, models
from tests.policy.views import BLOCK, BLOCKS, SIMPLE, Story, request, view, worker
from workers.config import EngineConfig
from workers.request import SLO, FinishReason

pytestmark = pytest.mark.grid

WORKER = worker("m0")


def latency(batching: str = "chunked", budget: int = 100, tpot_slo_s: float | None = None) -> LatencyPredictor:
    """Costs: a millisecond for each prompt token, ten for each sequence that decodes."""
    engine = EngineConfig(
        block_size=BLOCK, kv_blocks=BLOCKS, batching=batching, max_batch_tokens=budget, max_running=10,
        tpot_slo_s=tpot_slo_s,
    )  # fmt: skip
    return LatencyPredictor(
        ClusterSpec("m", (PoolSpec("mixed", Role.MIXED, engine=engine, cost=SIMPLE),)), ActiveRequests()
    )


@pytest.mark.parametrize(
    ("decodes", "seconds", "steps"),
    [
        pytest.param(Decodes(0, 0, None), 0.200, 2, id="alone"),
        pytest.param(Decodes(0, 0, 0.05), 0.200, 2, id="without an SLO"),
        pytest.param(Decodes(2, 0, None), 0.2 + 3 * 0.02, 3, id="the budget, without an SLO"),
        pytest.param(Decodes(2, 0, 0.0605), 0.2 + 5 * 0.02, 5, id="40 tokens a step"),
        pytest.param(Decodes(2, 0, 0.0505), 0.2 + 7 * 0.02, 7, id="30 tokens a step, and 20"),
        pytest.param(Decodes(2, 0, 0.03), 0.2 + 10 * 0.02, 0, id="no time is left: 20 a step, as decodes alone take"),
    ],
)
def test_a_prompt_is_chunked_to_what_the_slo_leaves(decodes: Decodes, seconds: float, steps: int) -> None:
    predicted = latency().prefill_beside(WORKER, 200, 0, decodes)
    assert predicted == (pytest.approx(seconds), steps)


def test_each_batching_policy_chunks_in_its_own_way() -> None:
    decodes = Decodes(2, 0, 0.0505)
    steps = {name: latency(name).prefill_beside(WORKER, 200, 0, decodes)[1] for name in ("chunked", "adaptive", "orca")}
    assert steps == {"chunked": 7, "adaptive": 8, "orca": 1}
    assert latency("prefill-first").prefill_beside(WORKER, 200, 0, decodes) == (pytest.approx(0.2), 1)
    assert latency("prefill-only").prefill_beside(WORKER, 200, 0, decodes) == (pytest.approx(0.2), 2)
    assert latency(tpot_slo_s=0.0405).prefill_beside(WORKER, 200, 0, decodes)[1] == 10, "the engine's own bound"


@given(
    st.sampled_from(("chunked", "adaptive", "orca", "prefill-first", "prefill-only", "static")),
    st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 20), st.none() | st.floats(0.0, 10.0),
)  # fmt: skip
def test_more_decodes_and_tighter_slos_never_make_a_prompt_faster(
    batching: str, tokens: int, cached: int, batch: int, tpot_slo_s: float | None
) -> None:
    subject = latency(batching)
    alone_s, _ = subject.prefill_beside(WORKER, tokens, cached, Decodes(0, 0, None))
    beside_s, steps = subject.prefill_beside(WORKER, tokens, cached, Decodes(batch, 10 * batch, tpot_slo_s))
    free_s, _ = subject.prefill_beside(WORKER, tokens, cached, Decodes(batch, 10 * batch, None))
    assert alone_s == pytest.approx(tokens / 1000)
    assert beside_s >= free_s - 1e-9 and free_s >= alone_s - 1e-9
    assert 0 <= steps <= tokens


def test_decodes_of_ours_and_of_other_gateways_count() -> None:
    slo, picture = SLO(tpot_s=0.05), view(worker("m0"))
    story = Story("least-loaded", max_batch_tokens=1000)
    ours = request("a", length=100, max_tokens=50, slo=slo)
    story.send(picture, ours)
    story.prefilled(ours)
    predicted = story.choose(picture, request("b", length=200))
    assert isinstance(predicted, Placement) and predicted.predicted_ttft_s == pytest.approx(0.25), (
        "40 tokens in each 50 ms"
    )
    theirs = view(worker("m0", running=2, used=10))
    alone = Story("least-loaded", slo=slo, max_batch_tokens=1000).choose(theirs, request("b", length=200))
    assert isinstance(alone, Placement) and alone.predicted_ttft_s == pytest.approx(0.2 + 7 * 0.02)


@pytest.mark.parametrize("batching", ["chunked", "adaptive"])
def test_first_tokens_arrive_as_predicted_beside_decodes_with_an_slo(
    batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Dispatcher] = []
    build = Dispatcher.__init__

    def remembered(self: Dispatcher, *args: object, **options: object) -> None:
        build(self, *args, **options)  # type: ignore[arg-type]
        opened.append(self)

    monkeypatch.setattr(dispatcher_module.Dispatcher, "__init__", remembered)
    whole = colocated(2, engine=replace(ENGINE, kv_blocks=3000, batching=batching))
    spec = replace(whole, gateway=replace(whole.gateway, slo=SLO(2.0, 0.03), admission="slo"))
    simulate(spec, models(spec, COST), load_workload("poisson:rate=16,count=250,lengths=mixed", seed=3))
    errors = list(opened[0]._slo_scores._classes["default"].errors["ttft"])
    assert len(errors) > 150
    assert abs(median(errors)) < 0.07


def test_shares_are_charged_by_expected_answer_lengths() -> None:
    story = Story("least-loaded", "slo", SLO(ttft_s=1.0))
    wanted = request("a", length=100, max_tokens=400)
    room = RequestQueue(GatewaySpec(), story.policy.expected_tokens)
    before = room.enter(wanted, 0.0, 0.1)
    for n in range(100):
        story.policy.answered(request(f"r{n}", length=100, max_tokens=400), [1] * 20, FinishReason.STOP)
    after = room.enter(request("b", length=100, max_tokens=400), 0.0, 0.1)
    assert after.tokens == 120 < before.tokens
