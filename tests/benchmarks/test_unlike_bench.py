"""The bench of unlike GPUs: its tables are whole, and what it counts is what a run has."""

from dataclasses import replace

import pytest

from benchmarks import unlike
from benchmarks.unlike import ARRANGED, FIXED, PRICED, PROMPTS, Told, run, tables, told


def test_every_row_of_its_tables_has_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlike, "mean", lambda *_: Told(0.5, 0.25, 0.75, 12.0))
    lines = "\n".join(tables((0,))).splitlines()
    first, second = lines[: 2 + len(ARRANGED)], lines[3 + len(ARRANGED) :]
    assert len(second) == 2 + len(PRICED)
    assert {row.count("|") for row in first} == {6} and {row.count("|") for row in second} == {7}
    assert "50% (25%, 75%)" in first[2] and "| 50% | 12 |" in second[2]


def test_dollars_are_those_of_all_gpus_while_the_load_lasts() -> None:
    kinds = ARRANGED["H100s prefill, A100s decode"]
    found = run(kinds, FIXED, replace(PROMPTS, rate=2.0), seed=1, seconds=6.0)
    figures = told(kinds, found)
    assert figures.kept == 1.0 and figures.prompts > 0.5
    span_s = found.served[-1].arrival_s - found.served[0].arrival_s
    dollars = (8 * 4.76 + 8 * 2.21) * span_s / 3600.0
    assert figures.kept_a_dollar == pytest.approx(len(found.served) / dollars)
