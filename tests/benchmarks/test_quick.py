"""The command itself, as a person starts it. No figure decides a test."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import transfer
from benchmarks.__main__ import PARTS, Measurement, main
from benchmarks.figures import BenchmarkPart, report_from


@pytest.mark.campaign
def test_quick_transfer_prints_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "transfer", "--quick", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(file), "--out", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = report_from(file.read_bytes())
    (part,) = report.parts
    rows = {figure.row for figure in part.figures}
    assert rows == {f"{size} {pattern}" for size in transfer.QUICK_SIZES for pattern in transfer.PATTERNS}
    assert "tcp" in {figure.column for figure in part.figures}
    assert all(figure.spread.median > 0 for figure in part.figures)
    assert "1 MiB scattered" in done.stdout
    assert "| 1 MiB scattered |" in next(tmp_path.glob("*.md")).read_text()


def test_quick_tcp_links_have_a_rate_each() -> None:
    result = CliRunner().invoke(main, ["tcp-links", "--quick", "--rounds", "1"], env={"RAY_ADDRESS": None})
    assert result.exit_code == 0, result.output
    for row in ("memcpy, 1 thread", "1 link", "4 links of one reader", "4 links of one owner"):
        assert row in result.output


def test_quick_routing_times_decisions_with_and_without_new_statistics() -> None:
    result = CliRunner().invoke(main, ["routing", "--quick", "--rounds", "1"], env={"RAY_ADDRESS": None})
    assert result.exit_code == 0, result.output
    for row in ("64 workers, no statistics are new", "64 workers, one worker in ten has new ones"):
        assert row in result.output


@pytest.mark.campaign
def test_quick_kv_store_compares_with_raw_io() -> None:
    result = CliRunner().invoke(main, ["kv-store", "--quick", "--rounds", "1"], env={"RAY_ADDRESS": None})
    assert result.exit_code == 0, result.output
    for row in ("raw write", "raw read", "share of raw", "headers read", "memory per million blocks"):
        assert row in result.output


def test_a_part_that_fails_does_not_stop_the_others() -> None:
    def fail(rounds: int, quick: bool, progress: object) -> BenchmarkPart:
        raise RuntimeError("the machine is on fire")

    before = dict(PARTS)
    PARTS["handoff"] = Measurement(fail, 1)
    PARTS["startup"] = Measurement(
        lambda rounds, quick, progress: BenchmarkPart("startup", notes=(f"{rounds} rounds",)), 7
    )
    try:
        result = CliRunner().invoke(main, ["handoff", "startup"], env={"RAY_ADDRESS": None})
    finally:
        PARTS.update(before)
    assert result.exit_code == 1
    assert "Failed: RuntimeError: the machine is on fire" in result.output
    assert "7 rounds" in result.output


def test_ray_address_is_refused_with_one_line() -> None:
    result = CliRunner().invoke(main, ["startup"], env={"RAY_ADDRESS": "10.0.0.1:6379"})
    assert result.exit_code == 1
    assert result.output.strip().startswith("Error: RAY_ADDRESS is set")


def test_help_shows_an_example() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output and "peer-install" in result.output
