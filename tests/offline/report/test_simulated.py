"""A simulated run, through every score and picture."""

from pathlib import Path

import pytest

from cluster.offline.report.html import page
from cluster.offline.report.perfetto import events
from cluster.offline.report.table import SystemResult
from cluster.offline.scoring.figures import Figures, figures
from cluster.offline.scoring.records import Run
from cluster.offline.sim.cluster import PoolModel
from cluster.offline.sim.run import RunOptions, simulate
from cluster.offline.workload.load import load_workload
from cluster.spec_file import parse_spec
from tests.offline.report.trace_rules import check
from workers.costs import LinearCost
from workers.request import SLO

TEST_SLO = SLO(0.5, 0.05)
ENGINE = {"kv_blocks": 400, "max_batch_tokens": 256, "max_running": 32}


@pytest.fixture(scope="module")
def run() -> Run:
    pools = [{"name": f"{role}s", "role": role, "engine": ENGINE, "replicas": 2} for role in ("prefill", "decode")]
    spec = parse_spec({"model": "none", "name": "two-and-two", "pools": pools})
    cost = LinearCost(step_s=0.01, prefill_token_s=2e-4, decode_row_s=2e-4, decode_context_s=1e-6)
    workload = load_workload("poisson:rate=12,count=40,lengths=20-300/5-30", seed=3)
    return simulate(spec, {pool.name: PoolModel(cost) for pool in spec.pools}, workload, RunOptions(trace=True))


@pytest.fixture(scope="module")
def made(run: Run) -> Figures:
    return figures(run, TEST_SLO)


def test_tokens_and_steps_add_up(run: Run, made: Figures) -> None:
    assert made.finished == made.requests == 40
    assert sum(pool.steps for pool in made.pools) == len(run.steps)
    prefills, decodes = made.pools
    assert prefills.output_tokens == 40 and prefills.gpus == decodes.gpus == 2
    assert prefills.output_tokens + decodes.output_tokens == sum(len(each.token_s) for each in run.served)


def test_a_requests_ledger_agrees_with_its_client_times(run: Run, made: Figures) -> None:
    for each in run.served:
        assert each.ledger is not None
        assert each.ledger.ttft_ns / 1e9 == pytest.approx(each.ttft_s, abs=1e-6)
        assert each.ledger.total_ns / 1e9 == pytest.approx(each.e2e_s, abs=1e-6)
    assert made.e2e_s is not None
    assert sum(seconds for _, seconds in made.phases_s) == pytest.approx(made.e2e_s.mean, abs=1e-6)


def test_shares_are_shares(made: Figures) -> None:
    shares = [made.kv_occupancy, made.exposed_transfer_share, *(pool.busy_share for pool in made.pools)]
    assert all(share is not None and 0.0 < share < 1.0 for share in shares)


def test_its_trace_is_valid_and_has_every_kv_handoff(run: Run) -> None:
    traced = list(events(run))
    check(traced)
    assert sum(event["ph"] == "s" for event in traced) == sum(each.output_tokens > 1 for each in run.served)


@pytest.mark.full  # test_html.py writes a page of given figures
def test_its_page_is_written(run: Run, made: Figures, tmp_path: Path) -> None:
    written = page("simulated", [SystemResult("two-and-two", made, run=run)])
    assert written.count("<img") == 4 and "two-and-two" in written
