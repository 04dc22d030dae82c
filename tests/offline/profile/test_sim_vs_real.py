"""The comparison of simulated and real runs: equal runs have no error, different ones do, and the page has both."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.sim_vs_real import page, record
from benchmarks.sim_vs_real.__main__ import _merged, main
from benchmarks.sim_vs_real.compare import Row, compare, compared, mean_rows
from benchmarks.sim_vs_real.record import Recorded, recorded
from benchmarks.sim_vs_real.systems import (
    ANSWER,
    BLOCK,
    COLOCATED,
    KINDS,
    PREFIXES,
    PROMPTS,
    SAMPLES,
    SHIFT,
    SPLIT,
    SYSTEMS,
    capacity,
    slo_for,
    workload,
)
from cluster.offline.scoring.figures import figures
from cluster.offline.scoring.records import Run
from cluster.offline.sim.fleet import environment_of, measured_models
from cluster.offline.sim.run import RunOptions, simulate
from cluster.spec import ClusterSpec
from workers.costs import LinearCost
from workers.profiles.measured import ClusterProfile, Interference, LinkProfile, PoolProfile
from workers.profiles.profile_errors import ProfileError

COST = LinearCost(0.03, 0.003, 5e-7, 0.003, 5e-6)


def profile_of(spec: ClusterSpec, cost: LinearCost = COST, ratio: float = 1.2, call_s: float = 0.004) -> ClusterProfile:
    names = [pool.name for pool in spec.pools]
    return ClusterProfile(
        spec.name, "m", "2026-01-02T00:00:00+00:00", "2 cores", "python 3", 8192, 49152,
        tuple(PoolProfile(name, 1, 1, cost, gap_s=0.002, call_s=call_s) for name in names),
        (LinkProfile("prefill", "decode", "nixl", 0.001, 1e9),) if len(names) > 1 else (),
        tuple(Interference(one, other, ratio) for one in names for other in names if one != other),
        46_080,
        0.005,
    )  # fmt: skip


def ran(spec: ClusterSpec, profile: ClusterProfile, rate: float = 0.5, count: int = 12) -> Run:
    options = RunOptions(system=spec.name, environment=environment_of(profile))
    return simulate(spec, measured_models(profile, spec), workload(spec.name, count, rate, 0), options)


def real_of(run: Run, profile: ClusterProfile, load: float = 0.5) -> record.RealRun:
    return recorded(run, {"prefill_queue": 0.1}, load, slo_for(profile, SYSTEMS[run.system]))


@pytest.mark.grid(keep=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SYSTEMS.values(), ids=SYSTEMS)
def test_the_simulator_reproduces_its_own_run(spec: ClusterSpec, kind: str) -> None:
    profile = profile_of(spec)
    sent = workload(spec.name, 12, 0.5, 0, kind=kind)
    options = RunOptions(system=spec.name, environment=environment_of(profile))
    run = simulate(spec, measured_models(profile, spec), sent, options)
    real = recorded(run, {}, 0.5, slo_for(profile, spec), sent, kind)
    assert real.workload.arrivals == sent.arrivals
    found = compare(real, profile)
    for row in found.rows:
        assert row.met and row.error == pytest.approx(0.0, abs=1e-2), row
    assert max(found.each_ttft, found.each_tpot) < 1e-2


def test_prompts_of_a_turn_share_system_prompts_and_a_shifting_load_changes_half_way() -> None:
    one, other = (workload("w", 20, 0.5, 0, turn, PREFIXES) for turn in (1, 2))
    shared = {each.prefix[0] for each in one.arrivals}
    assert len(shared) == 2 and all(each.prompt_tokens > BLOCK for each in one.arrivals)
    assert not {block for each in one.arrivals for block in each.prefix} & {
        block for each in other.arrivals for block in each.prefix
    }
    shift = workload("w", 20, 0.5, 0, kind=SHIFT).arrivals
    assert shift[9].prompt_tokens > shift[10].prompt_tokens and shift[9].output_tokens < shift[10].output_tokens


def test_the_answers_of_samples_share_the_work_of_their_prompt() -> None:
    profile = profile_of(SPLIT)
    sent = workload("w", 12, 0.5, 0, kind=SAMPLES)
    assert [each.sample for each in sent.arrivals] == [0, 1, 2] * 4
    run = simulate(SPLIT, measured_models(profile, SPLIT), sent, RunOptions(environment=environment_of(profile)))
    prompts = sum(each.prompt_tokens for each in sent.arrivals) // 3
    computed = sum(each.prompt_tokens for each in run.workers if each.role == "prefill")
    assert prompts <= computed <= prompts + 2 * 4, "each further answer computes the last token"


def test_runs_of_a_cell_are_compared_by_their_means() -> None:
    runs = [[Row("TTFT p50", 1.0, 1.2, 0.1)], [Row("TTFT p50", 3.0, 2.8, 0.1)], [Row("TTFT p50", None, 9.0, 0.1)]]
    (row,) = mean_rows(runs)
    assert (row.real, row.simulated, row.met) == (2.0, 2.0, True)
    assert page.rows([row, runs[0][0]])[1][-1] == "**missed**" and page.rows([row])[0][-1] == "met"


def test_a_cluster_twice_as_slow_has_errors() -> None:
    profile = profile_of(COLOCATED)
    slow = profile_of(COLOCATED, COST.scaled(2.0))
    found = compare(real_of(ran(COLOCATED, slow), profile), profile)
    errors = {row.metric: row.error for row in found.rows}
    assert errors["TPOT p50"] is not None and -0.9 < errors["TPOT p50"] < -0.3
    assert not any(row.met for row in found.rows if row.metric.startswith("TTFT"))
    tpot_s = found.rows[3].real
    assert tpot_s is not None
    text = page.section(Recorded({"colocated": profile}, (real_of(ran(COLOCATED, slow), profile),)), [found])
    assert f"| TPOT p50 | {tpot_s * 1e3:.1f} ms |" in text and "**-" in text


def test_a_second_run_of_the_same_requests_is_counted_beside_the_simulator(tmp_path: Path) -> None:
    profile = profile_of(COLOCATED)
    alike, slower = (
        real_of(ran(COLOCATED, profile_of(COLOCATED, COST.scaled(ratio))), profile) for ratio in (1.01, 2.0)
    )
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    record.save(Recorded({"colocated": profile}, (real_of(ran(COLOCATED, profile), profile),)), first)
    for run, texts in ((alike, ["meets 7, the simulator 7"]), (slower, ["meets 0, the simulator 7"])):
        record.save(Recorded({"colocated": profile}, (run,)), second)
        result = CliRunner().invoke(main, ["--record", str(first), "--against", str(second)])
        assert result.exit_code == 0, result.output
        assert [line.rpartition("run ")[2] for line in result.output.splitlines()] == texts
    same = CliRunner().invoke(main, ["--record", str(first), "--against", str(first)])
    assert same.exit_code == 0 and not same.output, "a run is no second run of itself"


def test_every_part_of_the_profile_reaches_the_simulation() -> None:
    plain = profile_of(SPLIT, ratio=1.0, call_s=0.0)
    plain = replace(plain, frontend_s=0.0)
    base = figures(ran(SPLIT, plain), slo_for(plain, SPLIT))
    assert base.ttft_s is not None and base.tpot_s is not None
    for changed in (
        replace(plain, frontend_s=0.1),
        profile_of(SPLIT, ratio=1.0, call_s=0.1),
        profile_of(SPLIT, ratio=1.5, call_s=0.0),
        replace(plain, pools=tuple(replace(pool, gap_s=0.05) for pool in plain.pools)),
    ):
        slower = figures(ran(SPLIT, changed), slo_for(plain, SPLIT))
        assert slower.ttft_s is not None and slower.ttft_s.p50 > base.ttft_s.p50


def test_a_pool_that_was_not_measured_cannot_be_simulated() -> None:
    with pytest.raises(ProfileError, match="'mixed' was not measured"):
        measured_models(profile_of(SPLIT), COLOCATED)


def test_equal_seeds_ask_for_equal_lengths_and_turns_share_no_prompt() -> None:
    one, other = workload("w", 30, 0.3, 5, 1), workload("w", 30, 0.9, 5, 2)
    assert [each.prompt_tokens for each in one.arrivals] == [each.prompt_tokens for each in other.arrivals]
    assert {each.prompt_tokens for each in one.arrivals} == set(PROMPTS)
    assert {each.output_tokens for each in one.arrivals} == {ANSWER}
    assert not {each.prefix for each in one.arrivals} & {each.prefix for each in other.arrivals}
    assert workload("w", 5, None, 0).duration_s == 0.0


def test_the_capacity_is_what_the_slower_pool_can_do() -> None:
    profile = profile_of(SPLIT, ratio=1.0)
    cost = profile.cost("prefill")
    mean_s = sum(cost.prefill_seconds(length) for length in PROMPTS) / len(PROMPTS)
    assert 0.5 / mean_s < capacity(profile, SPLIT, 40, 0) < 1.5 / mean_s


def test_nothing_to_compare_is_no_error() -> None:
    assert Row("TTFT p50", None, 1.0, 0.1).error is None and not Row("TTFT p50", 0.0, 1.0, 0.1).met
    profile = profile_of(COLOCATED)
    real = real_of(ran(COLOCATED, profile), profile)
    nothing = replace(real, seen=tuple(replace(each, token_s=()) for each in real.seen))
    assert compared(nothing, ran(COLOCATED, profile)).each_ttft == 0.0


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = profile_of(SPLIT)
    found = Recorded({"split": profile}, (real_of(ran(SPLIT, profile), profile),))
    record.save(found, tmp_path / "r.json")
    assert record.load(tmp_path / "r.json") == found
    assert found.runs[0].workload.arrivals[3].at_s == found.runs[0].seen[3].at_s


def test_a_new_profile_ends_the_runs_of_the_old_one() -> None:
    split, mixed = profile_of(SPLIT), profile_of(COLOCATED)
    first = real_of(ran(SPLIT, split), split)
    other = real_of(ran(COLOCATED, mixed), mixed)
    found = Recorded({"split": split, "colocated": mixed}, (first, other))
    again = replace(first, load=0.8)
    assert _merged(found, "split", split, [again], fresh=True).runs == (again, other)
    assert _merged(found, "split", split, [again], fresh=False).runs == (first, again, other)
    assert _merged(found, "split", split, [first], fresh=False).runs == (first, other)


def test_the_section_is_put_between_its_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    page.write("one", tmp_path)
    file = tmp_path / page.PAGE
    file.write_text("# Title\n\nBefore.\n" + file.read_text() + "\nAfter.\n")
    before = file.read_text()
    page.write("two", tmp_path)
    assert file.read_text() == before.replace("\n\none\n\n", "\n\ntwo\n\n")


def test_recorded_runs_are_simulated_again_without_a_cluster(tmp_path: Path) -> None:
    profile = profile_of(SPLIT)
    record.save(Recorded({"split": profile}, (real_of(ran(SPLIT, profile), profile),)), tmp_path / "r.json")
    result = CliRunner().invoke(main, ["--recorded", "--record", str(tmp_path / "r.json"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "TTFT p99" in (tmp_path / page.PAGE).read_text()


def test_contradictions_are_refused(tmp_path: Path) -> None:
    record_file = str(tmp_path / "none.json")
    both = CliRunner().invoke(main, ["split", "--recorded", "--record", record_file])
    unknown = CliRunner().invoke(main, ["split", "--keep-profile", "--record", record_file])
    assert both.exit_code != 0 and "--recorded runs nothing" in both.output
    assert unknown.exit_code != 0 and "no recorded profile" in unknown.output


@pytest.mark.full
def test_the_simulator_meets_as_many_figures_of_the_recorded_runs_as_docs_simulator_says() -> None:
    """Virtual time, so no machine decides: real runs and profiles are those of recorded.json."""
    found = record.load()
    cells: dict[tuple[str, str, float], list[Sequence[Row]]] = {}
    for real in found.runs:
        cells.setdefault(real.cell, []).append(compare(real, found.profiles[real.system]).rows)
    assert len(cells) == 12 and all(len(runs) == 5 for runs in cells.values())
    met: Counter[str] = Counter()
    for (system, _, _), runs in cells.items():
        met[system] += sum(row.met for row in mean_rows(runs))
    assert met["split"] >= 27 and met["colocated"] >= 25 and met["ours"] >= 23, met
