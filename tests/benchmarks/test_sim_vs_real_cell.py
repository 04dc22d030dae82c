"""A small cell of `make sim-vs-real` on a real cluster. What it asserts does not depend on how fast the machine is."""

from math import isfinite
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.sim_vs_real import page, record
from benchmarks.sim_vs_real.__main__ import main
from benchmarks.sim_vs_real.compare import compare
from benchmarks.sim_vs_real.systems import SAMPLES, SPLIT, workload
from cluster.offline.scoring.records import RequestOutcome
from cluster.offline.sim.fleet import environment_of, measured_models
from cluster.offline.sim.run import RunOptions, simulate

pytestmark = pytest.mark.full


def test_real_and_simulated_clusters_serve_the_same_answers_and_the_report_has_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "recorded.json"
    cell = ("split", "--kind", SAMPLES, "--runs", "1", "--answers", "6", "--rounds", "1")
    result = CliRunner().invoke(main, [*cell, "--out", str(tmp_path), "--record", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = record.load(file)
    (real,), profile = found.runs, found.profiles["split"]
    alike = workload("alike", 6, real.workload.rate, real.seed, 1, SAMPLES).arrivals
    assert [(each.prompt_tokens, each.output_tokens, each.prefix, each.sample) for each in real.workload.arrivals] == [
        (each.prompt_tokens, each.output_tokens, each.prefix, each.sample) for each in alike
    ]
    options = RunOptions(environment=environment_of(profile))
    simulated = simulate(SPLIT, measured_models(profile, SPLIT), real.workload, options)
    for one, other in zip(real.run.served, simulated.served, strict=True):
        assert one.outcome is other.outcome is RequestOutcome.FINISHED
        assert len(one.token_s) == len(other.token_s) == one.output_tokens
        assert (one.prefill_worker, one.decode_worker) == (other.prefill_worker, other.decode_worker)
    rows = compare(real, profile).rows
    assert all(row.error is not None and isfinite(row.error) for row in rows)
    text = (tmp_path / page.PAGE).read_text()
    assert all(f"| {row.metric} |" in text for row in rows)
