"""A campaign's record is completed by what is measured again, and the page says what is in it."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.elastic import campaign, one, page, per_phase, record
from benchmarks.elastic.__main__ import main
from benchmarks.elastic.campaign import RecordMismatch, measure
from benchmarks.elastic.contenders import Contender
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.record import KINDS, PER_PHASE, ROUTER, SPLIT, SYSTEM, Entry, Phases, Record, Stale, ratio
from benchmarks.elastic.scenarios import SCENARIOS
from benchmarks.elastic.search import SearchEffort
from benchmarks.elastic.timeline import Timeline
from cluster.offline.scoring.figures import Attainment
from tests.benchmarks.elastic_probes import SMALL, made, pretend

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# ---- the record --------------------------------------------------------------------------------------------------


def test_ratios_are_by_seed() -> None:
    found = ratio((2.0, 4.0, 6.0), (1.0, 2.0, 3.0))
    assert found is not None and (found.mean, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    few = ratio((2.0, 4.0, 6.0), (1.0,))
    assert few is not None and few.text == "2.00"
    assert ratio((1.0,), (0.0,)) is None


def test_contenders_ahead_of_ours_are_listed() -> None:
    entries = (
        Entry("ours", "ours", (2.0,), 2.0, 2.0, 2.0),
        Entry(SPLIT, "split 1, chunk 1024", (1.0,), 1.0, 1.0, 1.0, 1),
        Entry(SYSTEM, "vllm", (4.0,), 4.0, 4.0, 4.0),
        Entry(ROUTER, "random on split 1, chunk 1024", (1.0,), 1.0, 1.0, 1.0, 1),
        Entry(ROUTER, "slo on split 1, chunk 1024", (3.0,), 3.0, 3.0, 3.0, 1),
        Entry(PER_PHASE, "knows", (8.0,), 8.0, 8.0, 8.0),
    )
    nothing = Entry(SYSTEM, "static", (0.0,), 0.0, 0.0, 0.0)
    result = replace(_result(), entries=(*entries, nothing))
    found = Record((result,))
    assert page.losing(found) == [
        "phases: 0.50 times vllm, one seed",
        "phases: 0.67 times Diptych's router, fixed roles: slo on split 1, chunk 1024, one seed",
    ]
    assert [line.partition(":")[0] for line in page.aims(found)] == ["holds", "holds", "FALLS SHORT"]
    row = page.verdicts(found).splitlines()[-1]
    assert row == "| phases |  | 0.250 | 0.125 | - | 0.500 | 0.125 | - | 1.000 |"
    assert page.ratios(found).splitlines()[-1] == "| phases | 2.00 | 2.00 | 0.50 | 2.00 | - | 0.25 |"
    assert page.aim_table(found).splitlines()[-1] == "| phases | yes, 2.00 | yes, 2.00 | - | **no**, 0.25 |"


def test_the_best_of_a_kind_has_all_seeds() -> None:
    entries = (
        Entry("ours", "ours", (3.0, 1.0), 2.0, 2.0, 2.0),
        Entry(SYSTEM, "vllm", (2.9, 0.9), 1.9, 1.9, 1.9),
        Entry(SYSTEM, "orca", (2.8,), 2.8, 2.8, 2.8),
    )
    found = Record((replace(_result(), entries=entries),))
    assert "| 0.237 (" in page.verdicts(found).splitlines()[-1]
    assert page.losing(found) == []


def test_phases_in_which_ours_attains_less_are_listed() -> None:
    def phase(name: str, requests: int, kept: float) -> one.PhaseOutcome:
        return one.PhaseOutcome(name, requests, kept, kept, 1.0, (), (), 0, 0, 0, 0, 0, 0)

    entries = (
        Entry("ours", "ours", (2.0,), 2.0, 2.0, 2.0),
        Entry(SPLIT, "split 1, chunk 1024", (1.0,), 1.0, 1.0, 1.0, 1),
    )
    mine = Phases("ours", 2.0, (phase("all", 30, 0.5), phase("a", 10, 0.5), phase("b", 10, 1.0), phase("a", 10, 0.0)))
    theirs = Phases("split 1, chunk 1024", 2.0, (phase("all", 30, 0.6), phase("a", 20, 0.5), phase("b", 10, 0.4)))
    found = Record((replace(_result(), entries=entries, phases=(mine, theirs)),))
    assert page.lost_phases(found) == [
        "phases, a: 25.0% of 20 requests met both SLOs, 50.0% with split 1, chunk 1024, at 2.00 requests/s"
    ]


def test_stale_views_have_a_row_per_number_of_gateways() -> None:
    kept = [Stale("day", "ours", age, gateways, 2.0, (0.9, 1.0)) for gateways in (1, 4) for age in (0.0, 2.0)]
    table = page.stale_table(kept[:-1]).splitlines()
    assert table[0] == "|  | gateways | 0 s | 2 s |"
    assert table[2:] == ["| ours | 1 | 95.0% | 95.0% |", "| ours | 4 | 95.0% | - |"]


# ---- completing a record -----------------------------------------------------------------------------------------


RATES = {"ours": 3.0, "split 1, chunk 2048": 2.0, "colocated, chunk 512": 1.5}
LITTLE = SearchEffort((0, 1), (0,), 0.05, 0.2, 0.3, 1, ("vllm", "distserve"), ("random",), (2048,), (512,))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> record.Result:
    """A whole workload, with searches that pretend."""
    pretend(monkeypatch, lambda one: RATES.get(one.name, 1.0))
    monkeypatch.setattr(per_phase, "attainment", lambda run, slo: Attainment(1.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(
        campaign, "_shown", lambda who: (Phases(who.name, who.rate, ()), Timeline(who.name, who.rate, 1.0, (1.0,), {}))
    )
    monkeypatch.setattr(ScenarioProbe, "run", lambda *_, **__: None)
    return _whole()


@cache
def _whole() -> record.Result:
    """Measured once, with what the first test patched."""
    return measure(made("phases-a100"), LITTLE, map, lambda _: None)


@pytest.mark.campaign
def test_only_the_requested_kinds_are_measured_again(monkeypatch: pytest.MonkeyPatch, recorded: record.Result) -> None:
    load, asked = made("phases-a100"), set()

    def most(one: Contender) -> float:
        asked.add(one.name)
        return {**RATES, "ours": 4.0}.get(one.name, 1.0)

    pretend(monkeypatch, most)
    again = measure(load, replace(LITTLE, seeds=(0, 1, 2)), map, lambda _: None, {record.OURS}, recorded)
    assert asked == {"ours"}
    ours = again.of(record.OURS)
    assert ours is not None and ours.rate == pytest.approx(4.0, rel=0.05) and len(ours.by_seed) == 3
    assert again.entries == (ours, *recorded.entries[1:])
    assert {each.name: each.rate for each in again.phases} == {
        "ours": ours.rate,
        "split 1, chunk 2048": ours.rate,
        "colocated, chunk 512": ours.rate,
    }


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_can_be_measured_again_alone(recorded: record.Result, kind: str) -> None:
    again = measure(made("phases-a100"), LITTLE, map, lambda _: None, {kind}, recorded)
    assert [(each.kind, each.name) for each in again.entries] == [(each.kind, each.name) for each in recorded.entries]
    for mine, other in zip(again.entries, recorded.entries, strict=True):
        assert mine.rate == pytest.approx(other.rate, rel=0.25) and (mine.kind == kind or mine == other)


@pytest.mark.campaign
def test_a_static_configuration_with_two_names_is_measured_once(recorded: record.Result) -> None:
    effort = replace(LITTLE, systems=("sarathi",), routers=("least-loaded", "random"))
    again = measure(made("phases-a100"), effort, map, lambda _: None, {SYSTEM, ROUTER}, recorded)
    by_name = {each.name: each for each in again.entries}
    split, mixed = by_name["split 1, chunk 2048"], by_name["colocated, chunk 512"]
    assert by_name["least-loaded on split 1, chunk 2048"].by_seed == split.by_seed
    assert by_name["sarathi"].by_seed == mixed.by_seed and by_name["sarathi"].kind == SYSTEM
    assert by_name["random on split 1, chunk 2048"].rate == pytest.approx(1.0, rel=0.05)


@pytest.mark.campaign
def test_a_record_mismatch_names_its_reason(recorded: record.Result) -> None:
    other = made("phases-a100", replace(SMALL, stretch=0.2))
    with pytest.raises(RecordMismatch, match=r"seconds is 24\.0 in the record and would be 48\.0"):
        measure(other, LITTLE, map, lambda _: None, {record.OURS}, recorded)
    with pytest.raises(RecordMismatch, match="another mix of its 2 kinds of requests"):
        measure(made("phases-a100"), LITTLE, map, lambda _: None, {record.OURS}, replace(recorded, full_rate=1.0))
    without = replace(recorded, entries=tuple(each for each in recorded.entries if each.kind != SPLIT))
    with pytest.raises(RecordMismatch, match="the record has no best split"):
        measure(made("phases-a100"), LITTLE, map, lambda _: None, {record.OURS}, without)


def test_one_kind_of_requests_is_alike_at_any_scale() -> None:
    """Closed forms set what scale 1 means; the requests at a rate in requests/s stay the same."""
    now, before = made("bursts"), _known_as("bursts", 1.0)
    campaign._check_alike(now, before)
    with pytest.raises(RecordMismatch, match="measure the whole workload"):
        campaign._check_alike(made("phases-a100"), _known_as("phases-a100", 1.0))


def _known_as(name: str, full_rate: float) -> record.Result:
    load = made(name)
    return replace(
        _result(), workers=load.workers, seconds=load.seconds, slo=load.slo, scenario=name, full_rate=full_rate
    )


@pytest.mark.campaign
def test_a_record_is_completed_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, recorded: record.Result, tmp_path: Path
) -> None:
    old = recorded.stamped("2026-01-02", "", "")
    record.save(Record((old,)), tmp_path / record.FILE.name)
    pretend(monkeypatch, lambda one: {**RATES, "ours": 4.0}.get(one.name, 1.0))
    args = ["--quick", "--processes", "1", "--out", str(tmp_path)]
    ran = CliRunner().invoke(main, [*args, "--again", "ours", "--seeds", "2"])
    assert ran.exit_code == 0, ran.output
    (result,) = record.load(tmp_path / record.FILE.name).results
    ours = result.of(record.OURS)
    assert ours is not None and len(ours.by_seed) == 2 and ours.rate == pytest.approx(4.0, rel=0.35)
    assert ours.date and {each.date for each in result.entries[1:]} == {"2026-01-02"}, "the others keep their dates"
    assert [replace(each, date="") for each in result.entries[1:]] == list(recorded.entries[1:])
    assert f"Measured 2026-01-02 and {ours.date} on " in " ".join((tmp_path / page.PAGE).read_text().split())
    for wrong, words in (
        (["bursts", "--again", "ours"], "the record lacks bursts"),
        (["--again", "ours", "--workers", "3"], "workers is 2 in the record and would be 3"),
        (["--again", "nobody"], "is not one of"),
    ):
        ran = CliRunner().invoke(main, [*args, *wrong])
        assert ran.exit_code != 0 and words in ran.output and "Traceback" not in ran.output, ran.output


def _result() -> record.Result:
    slo = SCENARIOS["phases-a100"](SMALL).slo
    return record.Result("phases", "", "", 8, 2, slo, True, 24.0, (), 3.0, (0,), 0.05, (), (), (), 0.0)


@pytest.mark.skipif(not record.FILE.exists(), reason="no campaign was recorded yet")
def test_the_page_matches_the_committed_record() -> None:
    again = "run `make elastic ARGS=--recorded`"
    assert (RESULTS / page.PAGE).read_text() == page.markdown(record.load()), again


def test_the_comparison_has_no_figures_of_its_own() -> None:
    """What it says of the campaign's goodputs is what the campaign's page says."""
    goodput = re.compile(r"\b0\.\d{3}\s+\(0\.\d{3}\s+to\s+0\.\d{3}\)")
    found = {" ".join(found.split()) for found in goodput.findall((ROOT / "docs" / "comparison.md").read_text())}
    assert len(found) >= 5
    assert found <= set(goodput.findall((RESULTS / page.PAGE).read_text()))
