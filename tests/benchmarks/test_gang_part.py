"""What a gang costs: its plans, shards and pipelines are what they say. No figure decides a test."""

import pytest

from benchmarks.figures import grids
from benchmarks.gang import bubble, reshard, steps
from benchmarks.gang.driver import GangWorkerConfig
from benchmarks.gang.plan_times import PlanTime, RankTime, bubble_share, equal_parts_bubble
from benchmarks.gang.plans import PLANS, decode_plan, prompt_plan
from benchmarks.gang.worker_process import worker_process
from cluster.offline.load.processes import ProcessFailed

pytestmark = pytest.mark.full


def test_plans_have_the_sizes_in_their_names() -> None:
    assert [plan.num_tokens for plan in PLANS.values()] == [1, 16, 32, 512]
    (chunk,) = prompt_plan().chunks
    assert len(chunk.blocks) * 16 == 512
    for chunk in decode_plan(32).chunks:
        assert chunk.first_position < len(chunk.blocks) * 16 <= chunk.context + 16
    tables = [block for chunk in decode_plan(32).chunks for block in chunk.blocks]
    assert len(set(tables)) == len(tables)


def executed(begun_s: float, ended_s: float, *busy_s: float, wait_s: float = 0.0) -> PlanTime:
    """A plan that took each rank so long, besides a wait of `wait_s` for the stage before."""
    return PlanTime(begun_s, ended_s, tuple(RankTime(busy + wait_s, 0.0, wait_s) for busy in busy_s))


def test_one_plan_leaves_all_stages_but_one_idle() -> None:
    assert bubble_share([executed(0.0, 3.0, 1.0, 1.0, 1.0)], 3) == pytest.approx(2 / 3)


@pytest.mark.parametrize("num_plans", [1, 4, 16])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_equal_plans_have_the_fill_and_drain_bubble(num_plans: int, stages: int) -> None:
    plans = [executed(max(0.0, n - stages), float(n + stages), *[1.0] * stages, wait_s=0.5) for n in range(num_plans)]
    assert bubble_share(plans, stages) == pytest.approx(equal_parts_bubble(num_plans, stages))


def test_time_without_a_plan_is_not_bubble() -> None:
    assert bubble_share([executed(0.0, 1.0, 1.0), executed(9.0, 10.0, 1.0)], 1) == 0.0


def test_a_stage_is_busy_as_long_as_its_slowest_tensor_rank() -> None:
    assert bubble_share([executed(0.0, 2.0, 1.0, 0.2, 0.2, 1.0)], 2) == pytest.approx(0.5)


def test_plans_from_the_middle_of_a_run_have_no_fill() -> None:
    plans = [executed(n - 1.0, n + 1.0, 1.0, 1.0) for n in range(1, 9)]
    assert bubble_share(plans[1:], 2, since_s=plans[0].ended_s) == pytest.approx(0.0)
    assert bubble_share(plans[1:], 2) > 0.0


def test_a_bubble_needs_plans() -> None:
    with pytest.raises(ValueError, match="no plan"):
        bubble_share([], 2)


def test_a_simulated_pipeline_runs_all_tasks() -> None:
    with worker_process(GangWorkerConfig("smollm2-135m", 1, 2, 1, "simulated")) as worker:
        prompts = worker.run("prompts", 2, 64)
        answers = worker.run("answers", 2, 64, 2)
        direct = worker.run("plan", "decode of 1", 3)
    assert {len(plan.ranks) for plan in (*prompts, *answers, *direct)} == {2}
    assert all(plan.begun_s < plan.ended_s for plan in (*prompts, *answers, *direct))
    assert len(direct) == 3 and len(answers) >= 3
    assert 0.0 < bubble_share(prompts, 2) < 1.0


def test_a_worker_that_fails_to_start_reports_its_error() -> None:
    with (
        pytest.raises(ProcessFailed, match="no-such-model"),
        worker_process(GangWorkerConfig("no-such-model", 1, 1, 1)),
    ):
        pass


def test_bubble_is_compared_with_fill_and_drain() -> None:
    samples = {("simulated", 2, 4): {bubble.PROMPTS: [0.30], bubble.FILL: [0.25], bubble.ANSWERS: [0.1]}}
    (claim,) = bubble.claims(samples)
    assert claim.met and claim.value == pytest.approx(0.05)
    assert [figure.spread.median for figure in bubble.figures(samples)] == [0.30, 0.25, 0.1]


def test_cost_of_a_second_rank_is_compared_with_a_model_step() -> None:
    empty = {(name, plan): [1e-3 if name == "2x1" else 4e-4] for name in ("1x1", "2x1") for plan in steps.EMPTY_PLANS}
    real = {(name, plan): [(0.010, 0.3, 0.2)] for name in steps.REAL for plan in steps.REAL_PLANS}
    (claim,) = steps.claims(empty, real)
    assert claim.value == pytest.approx(0.06) and not claim.met
    tables = {grid.title: grid for grid in grids(steps.figures(empty, real))}
    assert [row[0] for row in tables[steps.COMM].rows] == [steps.SHARED]
    assert tables[steps.COMM].rows[0][1:] == ("30.0%",) * 3
    assert tables[steps.WAIT].rows[0][1:] == ("20.0%",) * 3
    assert steps.claims(empty, {}) == ()


@pytest.mark.parametrize("split", reshard.SPLITS)
def test_the_shards_of_a_gang_are_the_whole_model(split: tuple[int, int]) -> None:
    cells = [
        (head, layer)
        for shard in reshard.shards(split)
        for head in range(*shard.heads)
        for layer in range(*shard.layers)
    ]
    assert len(cells) == len(set(cells)) == reshard.WHOLE.num_kv_heads * reshard.WHOLE.num_layers


def test_blocks_are_distinct_and_fragmented_ones_not_adjacent() -> None:
    run, scattered = reshard.blocks(50, False, 1), reshard.blocks(50, True, 1)
    assert run == tuple(range(1, 51))
    assert len(set(scattered)) == 50 and scattered != tuple(sorted(scattered))


@pytest.mark.parametrize("case", [case for case in reshard.CASES if case.num_tokens == reshard.REQUEST_TOKENS], ids=str)
@pytest.mark.parametrize("reader", [(1, 1), (3, 1), (2, 2)])
def test_every_byte_of_the_tokens_is_planned_once(case: reshard.ReshardCase, reader: tuple[int, int]) -> None:
    planned = reshard.resharding(case, (2, 1), reader)
    token_bytes = reshard.WHOLE.block_bytes // reshard.WHOLE.block_size
    tokens = case.num_tokens
    if case.staged or case.reader_block_size == reshard.WHOLE.block_size:  # whole blocks go
        tokens = reshard.WHOLE.blocks_for(tokens) * reshard.WHOLE.block_size
    assert planned.num_bytes == tokens * token_bytes


def test_equal_layouts_need_one_descriptor_per_rank_and_run() -> None:
    run, scattered = (reshard.ReshardCase(reshard.REQUEST_TOKENS, fragmented) for fragmented in (False, True))
    assert reshard.resharding(run, (2, 2), (2, 2)).num_descriptors == 4
    assert reshard.resharding(scattered, (1, 1), (1, 1)).num_descriptors == reshard.WHOLE.blocks_for(run.num_tokens)


def test_the_claim_is_about_the_slowest_pair() -> None:
    case = next(case for case in reshard.CASES if case.num_tokens == reshard.LONG_TOKENS)
    samples = {
        (case, (1, 1), reader): [reshard.Resharding(1, 100, slowest_s, 100)]
        for reader, slowest_s in (((1, 1), 0.001), ((2, 1), 0.003))
    }
    claims = {claim.what: claim for claim in reshard.claims(samples)}
    (judged,) = (claim for what, claim in claims.items() if "1x1 to 2x1" in what)
    assert judged.value == 0.003 and not judged.met


def test_resharding_is_measured_for_every_pair() -> None:
    part = reshard.measure(1, True, lambda line: None)
    tables = {grid.title: grid for grid in grids(part.figures)}
    assert len(tables) == len(reshard.CASES) + 1 and len(part.claims) == len(reshard.CASES) // 2
    for case in reshard.CASES:
        (table,) = (grid for title, grid in tables.items() if title.endswith(str(case)))
        assert [row[0] for row in table.rows] == [
            f"owner {reshard.split_name(split)}" for split in reshard.QUICK_SPLITS
        ]
