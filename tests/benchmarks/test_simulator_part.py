"""The simulator's benchmark measures what it says; no figure decides."""

import pytest

from benchmarks import simulator
from benchmarks.simulator import SimulatorCase, cases, figures, load, sample


def test_every_size_has_the_same_load_per_worker_and_the_middle_one_also_eightfold() -> None:
    made = cases((8, 64, 512), 8, with_hour=True)
    assert [(case.workers, case.requests) for case in made] == [(8, 64), (64, 512), (512, 4096), (64, 4096), (40, 0)]


def test_without_the_trace_lengths_have_its_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_SHARED", raising=False)
    arrivals = load(SimulatorCase("many", 8, 4, 2000)).arrivals
    prompts, answers = sorted(a.prompt_tokens for a in arrivals), sorted(a.output_tokens for a in arrivals)
    assert prompts[1000] == pytest.approx(simulator.PROMPT_TOKENS, rel=0.1)
    assert answers[1000] == pytest.approx(simulator.ANSWER_TOKENS, rel=0.1)


def test_a_sample_serves_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_SHARED", raising=False)
    case = SimulatorCase("few", 4, 2, 8)
    taken = sample(case)
    assert taken.requests == 8
    assert taken.tokens == sum(each.output_tokens for each in load(case).arrivals)
    assert {figure.column for figure in figures([taken])} == set(simulator.READINGS)
