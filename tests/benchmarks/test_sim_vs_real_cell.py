"""A small cell of `make sim-vs-real` on a real cluster. What it asserts does not depend on how fast the machine is, so
it takes the recorded profile: profiling needs an idle one.
"""

import tempfile
from collections.abc import Iterator
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

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.model]


@pytest.fixture
def own_core_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests may hold the machine's. The folder's path is short, because Ray has its sockets there too."""
    with tempfile.TemporaryDirectory(prefix="d-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


@pytest.mark.usefixtures("own_core_locks")
def test_real_and_simulated_clusters_serve_the_same_answers_and_the_report_has_every_figure(tmp_path: Path) -> None:
    file, profile = tmp_path / "recorded.json", record.load().profiles["split"]
    record.save(record.Recorded({"split": profile}, ()), file)
    cell = ("split", "--kind", SAMPLES, "--runs", "1", "--answers", "6", "--keep-profile")
    result = CliRunner().invoke(main, [*cell, "--out", str(tmp_path), "--record", str(file)], catch_exceptions=False)
    print(result.output)  # the figures: no assertion judges them
    assert result.exit_code == 0, result.output
    (real,) = record.load(file).runs
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
    for row in rows:
        assert row.real is not None and row.simulated is not None and isfinite(row.real + row.simulated), row
    text = (tmp_path / page.PAGE).read_text()
    assert all(f"| {row.metric} |" in text for row in rows)
