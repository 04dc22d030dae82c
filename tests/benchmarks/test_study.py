"""The batching study: the fit, the virtual clock, what defines each policy; and the page is what the code gives."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.study import page, pictures, record
from benchmarks.study.answers import StudyAnswer, StudyFigures, StudyRun, figures
from benchmarks.study.cells import (
    CHUNKED,
    ORCA,
    PREFILL_FIRST,
    PREFILL_ONLY,
    REFERENCE,
    STATIC,
    Cell,
    CellResult,
    PolicyVariant,
    capacity,
    cells,
    compute,
    rate,
    virtual_run,
)
from benchmarks.study.real import RecordingEngine, real_run, worker_config
from benchmarks.study.steps import HELD_OUT, SEEN, plan
from benchmarks.study.virtual import EngineArrival, replay
from benchmarks.study.workload import MIXES, StudyRequest, study_requests
from cluster.offline.workload.lengths import LONG_PROMPT, SHORT_ANSWER
from tests.engine.driving import model_facts
from workers.config import EngineConfig
from workers.costs import CostModel, LinearCost, step_seconds
from workers.engine.engine import Engine
from workers.engine.estimate import plan_seconds
from workers.executor.simulated import SimulatedModel, open_simulated, simulated_facts
from workers.profiles.fit import COEFFICIENTS, Point, fit, relative_error

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASURED = record.load()
AGAIN = "the page is not what the code gives; run `make study ARGS=--fitted`"


# ---- the fit -----------------------------------------------------------------------------------------------------


def points(cost: CostModel, noise: float = 0.0) -> list[Point]:
    draw = random.Random(0)
    factor = {shape: 1 + draw.uniform(-noise, noise) for shape in (*SEEN, *HELD_OUT)}
    return [Point(shape, step_seconds(shape, cost) * factor[shape], shape in HELD_OUT) for shape in factor]


def test_the_fit_recovers_the_cost_model_of_the_points() -> None:
    true = LinearCost(0.04, 1e-3, 5e-7, 2e-3, 7e-6)
    found = fit(points(true))
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3)
    rough = fit(points(true, noise=0.05))
    assert max(abs(relative_error(rough, point)) for point in points(true)) < 0.05


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    cost = LinearCost(0.04, 1e-3, 5e-7, 2e-3, 7e-6)
    falling = [replace(p, seconds=p.seconds - 3e-6 * p.shape.batch * p.shape.context) for p in points(cost)]
    steeper = [replace(p, seconds=p.seconds - 8e-6 * p.shape.batch * p.shape.context) for p in points(cost)]
    assert fit(falling).decode_context_s > 0.0
    assert fit(steeper).decode_context_s == 0.0


def test_points_held_out_do_not_move_the_fit() -> None:
    seen = points(LinearCost())
    moved = [replace(point, seconds=2 * point.seconds) if point.held_out else point for point in seen]
    assert fit(moved) == fit(seen)
    assert {point.shape.kind for point in seen if point.held_out} == {"prompts", "decodes", "mixed"}


def test_a_plan_costs_as_much_as_its_shape() -> None:
    for shape in (*SEEN, *HELD_OUT):
        made = plan(shape, 16, 49152)
        assert plan_seconds(LinearCost(), made) == pytest.approx(step_seconds(shape, LinearCost()))
        blocks = [block for chunk in made.chunks for block in chunk.blocks]
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < worker_config("").engine.kv_blocks


def test_the_committed_model_is_fitted_to_the_committed_points() -> None:
    found = fit(MEASURED.points)
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(MEASURED.cost, name), rel=1e-3)


# ---- virtual time ------------------------------------------------------------------------------------------------


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    engine = Engine(EngineConfig(kv_blocks=8), model_facts(context_length=64, vocab_size=50_000))
    requests = [StudyRequest("a", 0.0, 4, 3), StudyRequest("b", 0.5, 4, 2), StudyRequest("c", 9.0, 4, 1)]
    arrivals = [EngineArrival(each.at_s, each.request(), each.answer_tokens) for each in requests]
    assert replay(engine, arrivals, lambda _: 1.0) == {"a/0": [1.0, 2.0, 3.0], "b/0": [2.0, 3.0], "c/0": [10.0]}


def test_an_end_token_ends_an_answer_whatever_the_limit() -> None:
    requests = study_requests("short/short", 6, 0, 1.0)
    limited = virtual_run(LinearCost(), REFERENCE.config(LinearCost()), requests, max_tokens=512)
    assert limited == virtual_run(LinearCost(), REFERENCE.config(LinearCost()), requests)


def test_figures_of_an_answer() -> None:
    answers = (
        StudyAnswer(StudyRequest("a", 1.0, 10, 4), (2.0, 2.5, 4.0, 4.1)),
        StudyAnswer(StudyRequest("b", 0.0, 30, 2), (4.0, 5.0)),
    )
    found = figures([StudyRun(answers, preemptions=2)])
    assert (found.ttft_p50_s, found.gap_max_s, found.preemptions) == (pytest.approx(2.5), 1.5, 2)
    assert found.tpot_mean_s == pytest.approx((0.7 + 1.0) / 2)
    assert (found.requests_rate, found.output_rate, found.total_rate) == (2 / 5, 6 / 5, 46 / 5)


def test_a_seed_gives_the_same_lengths_at_every_rate() -> None:
    slow, fast, at_once = (study_requests("mixed", 50, 3, each) for each in (1.0, 4.0, None))
    assert [each.prompt_tokens for each in slow] == [each.prompt_tokens for each in fast]
    assert [each.at_s for each in slow] == pytest.approx([4 * each.at_s for each in fast])
    assert {each.at_s for each in at_once} == {0.0}
    for each in study_requests("long/short", 50, 0, None):
        assert LONG_PROMPT.least <= each.prompt_tokens <= LONG_PROMPT.most
        assert SHORT_ANSWER.least <= each.answer_tokens <= SHORT_ANSWER.most


# ---- what defines the policies, on the fitted machine ------------------------------------------------------------


def at(who: PolicyVariant, mix: str, load: float | None = 0.7) -> StudyFigures:
    requests = study_requests(mix, 60, 0, None if load is None else rate_at(mix, load))
    return figures([virtual_run(MEASURED.cost, who.config(MEASURED.cost), requests, who.max_tokens)])


@cache
def rate_at(mix: str, load: float) -> float:
    return rate(capacity(MEASURED.cost, mix), load)


def test_a_smaller_budget_shortens_gaps_and_delays_first_tokens() -> None:
    small, large, whole = (at(who, "long/short") for who in (CHUNKED[0], CHUNKED[-1], PREFILL_FIRST))
    assert small.gap_max_s < large.gap_max_s < whole.gap_max_s
    assert small.ttft_p50_s > large.ttft_p50_s
    assert small.ttft_p50_s > whole.ttft_p50_s
    assert at(CHUNKED[0], "long/short", None).total_rate < at(CHUNKED[-1], "long/short", None).total_rate


def test_a_step_with_decodes_stays_within_its_prompt_budget() -> None:
    cost = MEASURED.cost
    for who in CHUNKED:
        longest_s = cost.mixed_seconds(((who.budget, 2048),), 32, 16 * 1024)
        assert at(who, "long/short").gap_max_s < longest_s


def test_static_batching_has_the_highest_ttft_and_the_lowest_tpot() -> None:
    static, *others = (at(who, "mixed") for who in (STATIC, ORCA, PREFILL_FIRST, REFERENCE, PREFILL_ONLY[3]))
    assert static.ttft_p50_s > max(other.ttft_p50_s for other in others)
    assert static.gap_max_s < min(other.gap_max_s for other in others)


def test_policies_that_reserve_answers_never_preempt() -> None:
    found = {who.name: at(who, "long/long", None).preemptions for who in (ORCA, STATIC, REFERENCE, PREFILL_FIRST)}
    assert found["orca"] == found["static"] == 0
    assert found["chunked 512"] > 0 and found["prefill-first"] > 0


# ---- the real loop, and the page ---------------------------------------------------------------------------------


async def test_a_real_run_gives_every_request_its_tokens() -> None:
    config = worker_config("")
    config = replace(config, transfer=replace(config.transfer, backends=("simulated",)))
    executor = open_simulated(
        config,
        simulated_facts(model=SimulatedModel(1, 1, 2, vocab_size=50_000)),
        LinearCost(1e-4, 1e-6, 0, 0, 0),
        "study",
    )
    try:
        engine = RecordingEngine(EngineConfig(kv_blocks=64), executor.facts)
        run = await real_run(engine, executor, study_requests("short/short", 8, 0, 100.0))
    finally:
        await executor.close()
    assert all(len(answer.token_s) == answer.request.answer_tokens for answer in run.answers)
    assert all(answer.ttft_s > 0 for answer in run.answers)
    assert sum(plan.num_tokens for plan, _ in engine.steps) >= sum(
        answer.request.prompt_tokens for answer in run.answers
    )


def test_committed_cells_follow_from_the_committed_measurements() -> None:
    lines = (DOCS / page.TABLE).read_text().splitlines()
    for cell in (
        Cell("chunked 64", "short/short", 0.7),
        Cell("static", "long/short", 0.7),
        Cell("prefill-first", "long/short", 0.7),
        Cell("orca, max 512", "short/short", None),
    ):
        outcome = compute(MEASURED.cost, cell, cell.load and rate_at(cell.mix, cell.load))
        assert page.csv_row(cell, outcome) in lines, AGAIN
    assert len(lines) == 1 + len(list(cells()))


def test_the_page_shows_the_committed_measurements() -> None:
    text = (DOCS / page.PAGE).read_text()
    held_out = [point for point in MEASURED.points if point.held_out]
    for table in (page.naive_table(MEASURED), page.real_table(MEASURED), page.errors_table(MEASURED, held_out)):
        assert table in text, AGAIN
    assert MEASURED.date in text


@pytest.mark.campaign
def test_page_and_pictures_are_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few = compute(MEASURED.cost, Cell("orca", "short/short", None), None)
    grid = {cell: CellResult(None, few.pooled, few.seeds) for cell in cells()}
    for name in ("one", "other"):
        page.write(tmp_path / name, MEASURED, grid)
        pictures.draw(tmp_path / name, MEASURED, grid)
    written = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(written) == 7
    for name in written:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert all(f"**{mix}**" in (tmp_path / "one" / page.PAGE).read_text() for mix in MIXES)
    assert max(map(len, filter(lambda line: line[:1] not in "|!", page.markdown(MEASURED, grid).splitlines()))) <= 120
