"""Spreads, claims and tables: what is printed is what was measured, and what falls short says so."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.figures import (
    BenchmarkClaim,
    BenchmarkPart,
    BenchmarkReport,
    Figure,
    Spread,
    cell,
    grids,
    ratios,
    readable,
    report_from,
    report_json,
    spread,
)
from benchmarks.screen import markdown, show, summary

MET = BenchmarkClaim("first to second token", 0.1, 0.2, "ms")
SHORT = BenchmarkClaim("TTFT to the peer's", 0.8, 0.5, "x")
FIGURES = (
    Figure("Rates", "1 MiB", "tcp", "GB/s", Spread(2e9, 1e9, 3e9, 3)),
    Figure("Rates", "1 MiB", "nixl", "GB/s", Spread(4e9, 4e9, 4e9, 1)),
    Figure("Rates", "16 MiB", "nixl", "GB/s", Spread(5e9, 4e9, 6e9, 3)),
    Figure("Shares", "1 MiB", "digest", "%", Spread(0.25, 0.25, 0.25, 1)),
)
REPORT = BenchmarkReport(
    date="2026-01-02T03:04:05+00:00",
    machine="Linux",
    cores=2,
    cpus="some processor",
    memory_bytes=8 << 30,
    load_before=(0.1, 0.2, 0.3),
    load_after=(1.0, 0.5, 0.4),
    versions={"python": "3.11.7"},
    rounds=0,
    quick=False,
    parts=(
        BenchmarkPart("transfer", FIGURES, (MET, SHORT), ("a note",), 1.5),
        BenchmarkPart("peer", skipped="no vLLM"),
        BenchmarkPart("startup", failed="ProcessFailed: it ended"),
    ),
)


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([1.0, 2.0]).median == 1.5


def test_a_spread_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="no sample"):
        spread([])


def test_spread_refuses_a_median_outside_its_range() -> None:
    with pytest.raises(ValueError, match="is no spread"):
        Spread(4.0, 1.0, 3.0, 3)


def test_ratios_compare_round_by_round() -> None:
    assert ratios([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == Spread(2.0, 1.0, 3.0, 3)
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.0123, "ms", "12.3 ms"), (1.5e9, "GB/s", "1.50 GB/s"), (0.25, "%", "25.0%"), (3 * 2**20, "MiB", "3 MiB")],
)
def test_values_are_written_in_their_unit(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="parsec"):
        Figure("t", "r", "c", "parsec", spread([1.0]))


def test_a_claim_at_its_bound_is_met() -> None:
    assert replace(MET, value=MET.bound).met


def test_a_claim_may_have_a_lower_bound() -> None:
    faster = BenchmarkClaim("speed", 1.2, 1.1, "x", at_least=True)
    assert faster.met and not replace(faster, value=1.0).met
    assert str(faster) == "pass: speed: 1.20x, aim at least 1.10x"


def test_an_unmet_claim_is_reported() -> None:
    assert not SHORT.met
    assert str(SHORT) == "falls short: TTFT to the peer's: 0.80x, aim at most 0.50x"
    assert REPORT.unmet == (SHORT,)
    assert summary(REPORT) == "1 of 2 claims hold"
    assert "**falls short**: TTFT to the peer's: 0.80x" in markdown(REPORT)
    assert "falls short: TTFT to the peer's: 0.80x" in shown(REPORT.parts[0])


def test_a_skipped_or_failed_part_shows_its_reason() -> None:
    assert "Skipped: no vLLM" in shown(REPORT.parts[1])
    assert "Failed: ProcessFailed: it ended" in shown(REPORT.parts[2])
    assert "Skipped: no vLLM" in markdown(REPORT)


def test_a_range_is_shown_for_more_than_one_round() -> None:
    assert cell(FIGURES[0]) == "2.00 GB/s (1.00..3.00)"
    assert cell(FIGURES[1]) == "4.00 GB/s"


def test_missing_figures_leave_empty_cells() -> None:
    rates, shares = grids(FIGURES)
    assert rates.headers == ("", "tcp", "nixl")
    assert rates.rows == (
        ("1 MiB", "2.00 GB/s (1.00..3.00)", "4.00 GB/s"),
        ("16 MiB", "", "5.00 GB/s (4.00..6.00)"),
    )
    assert shares.title == "Shares"


def test_a_report_survives_json() -> None:
    read = report_from(report_json(REPORT))
    assert read == REPORT
    assert markdown(read) == markdown(REPORT)
    assert "| 16 MiB |  | 5.00 GB/s (4.00..6.00) |" in markdown(read)


def shown(part: BenchmarkPart) -> str:
    out = io.StringIO()
    show(part, Console(file=out, width=200))
    return out.getvalue()
