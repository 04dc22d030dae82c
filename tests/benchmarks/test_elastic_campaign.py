"""The campaign asks what it says it asks, its searches find what is there, and its page is what the record gives."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.elastic import one, page, per_phase, pictures, record, staleness
from benchmarks.elastic.__main__ import QUICK, contender, main
from benchmarks.elastic.campaign import measure
from benchmarks.elastic.contenders import (
    OURS,
    ROUTERS,
    Contender,
    View,
    case_of,
    colocated,
    contender_named,
    named,
    routed,
    splits,
)
from benchmarks.elastic.per_phase import PerPhase
from benchmarks.elastic.probe import ScenarioProbe
from benchmarks.elastic.record import KINDS, ROUTER, SYSTEM, Record
from benchmarks.elastic.scenarios import SCENARIOS, Scenario, ScenarioPhase, ScenarioSize
from benchmarks.elastic.search import Best, SearchEffort, SearchResult, jobs_of, ladder, searched, statics
from cluster.offline.scoring.figures import Attainment
from cluster.offline.sim.clock import run
from cluster.offline.sim.environment import RemoteWorker
from cluster.offline.sim.systems import SYSTEMS
from cluster.spec import SpecError
from tests.benchmarks.elastic_probes import SMALL, made, pretend
from workers.request import SLO
from workers.stats import WorkerStats

# ---- the load ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_its_rate_and_its_phases_cover_all_requests(name: str) -> None:
    load = made(name, ScenarioSize())
    thin, dense = (load.draw(scale, 0).arrivals for scale in (0.3, 0.9))
    assert len(thin) == pytest.approx(0.3 * load.rate * load.seconds, rel=0.2)
    assert len(dense) == pytest.approx(0.9 * load.rate * load.seconds, rel=0.2)
    assert all(0.0 <= each.at_s <= load.seconds for each in dense)
    assert len(load.phases) > 1 or not load.shifts


@pytest.mark.parametrize("name", ["phases-h100", "bursts", "day"])
def test_epochs_cover_the_whole_scenario(name: str) -> None:
    load = made(name, ScenarioSize())
    epochs = load.epochs or load.phases
    assert [each.begin_s for each in epochs] == pytest.approx([0.0, *(each.end_s for each in epochs[:-1])])
    assert epochs[-1].end_s == pytest.approx(load.seconds)


def test_a_phase_alone_has_the_same_requests_as_in_the_scenario() -> None:
    load = made("day", ScenarioSize())
    whole, parts = load.draw(0.5, 3).arrivals, [load.only(phase).draw(0.5, 3).arrivals for phase in load.phases]
    assert [each.output_tokens for each in whole] == [each.output_tokens for part in parts for each in part]
    assert all(each.at_s < load.phases[0].end_s for part in parts for each in part)


def test_at_scale_1_both_kinds_of_phase_saturate_the_fleet() -> None:
    load = made("phases-a100", ScenarioSize())
    prompts, answers = load.streams
    cost = load.machines.model().cost
    assert max(rate for _, rate in prompts.steps) * cost.prefill_seconds(2750) < load.workers
    assert max(rate for _, rate in answers.steps) * cost.prefill_seconds(350) < 0.3 * load.workers


# ---- who is compared ---------------------------------------------------------------------------------------------


def test_static_configurations_match_their_names() -> None:
    load = made("phases-a100", ScenarioSize(workers=4))
    assert {each.prefills for each in splits(4) if not each.plain} == {1, 2, 3}
    for each in splits(4):
        spec = case_of(each, load).spec
        assert [pool.replicas for pool in spec.pools] == [each.prefills, 4 - each.prefills]
        if not each.plain:
            assert {pool.engine.batching for pool in spec.pools} == {"prefill-first"}
            continue
        assert spec.pools[0].engine.max_batch_tokens == each.chunk
        assert {pool.engine.batching for pool in spec.pools} == {"chunked"} and spec.gateway.routing == "least-loaded"
    for each in colocated():
        (pool,) = case_of(each, load).spec.pools
        assert (pool.replicas, pool.engine.batching) == (4, "chunked" if each.plain else "prefill-first")
        assert pool.engine.max_batch_tokens == (each.chunk or load.fleet.engine.max_batch_tokens)
    assert {each.system for each in (*named(2), OURS)} == set(SYSTEMS)
    assert [case_of(one, load).spec.pools[0].replicas for one in named(3) if one.system == "distserve"] == [3]


def test_a_contender_is_found_by_its_name() -> None:
    everybody = [OURS, *splits(4), *colocated(), *named(2)]
    for who in [*everybody, *(replace(each, routing=name) for each in everybody for name in ROUTERS)]:
        assert contender_named(who.name) == who
    for name in ("", "split 2", "prompts: split 2, chunk 2048", "ours on"):
        with pytest.raises(SpecError, match="no contender"):
            contender_named(name)


def test_routers_run_on_the_best_static_configuration() -> None:
    load, split, mixed = made("phases-a100"), Contender("distserve", 1, 1024, plain=True), Contender("vllm")
    routers = {one.routing: case_of(one, load).spec for one in routed(split, mixed)}
    assert set(routers) == set(ROUTERS)
    for name, spec in routers.items():
        routing, _, admission = name.partition("+")
        assert (spec.gateway.routing, spec.gateway.admission) == (routing, "slo" if admission else "none")
        assert spec.pools == case_of(split if name in ("distserve", "splitwise") else mixed, load).spec.pools
    assert all(len(case_of(one, load).spec.pools) == 2 for one in routed(split, split))


def test_a_view_sets_gateways_and_heartbeat() -> None:
    case = case_of(OURS, made("phases-a100"), View(stale_s=2.0, gateways=3, call_s=0.01, heartbeat_s=4.0))
    assert (case.spec.gateway.replicas, case.spec.health.heartbeat_s) == (3, 4.0)
    assert case.spec.health.dead_after_s > 4.0
    assert all(model.call_s == 0.01 for model in case.models.values())


def test_stale_statistics_are_as_old_as_set() -> None:
    async def stats_seen() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        distant = RemoteWorker(object(), 0.0, 1.0)  # type: ignore[arg-type]
        begun_s, seen = loop.time(), []
        for number in range(40):
            stats = distant._aged(WorkerStats(running=number))
            seen.append((loop.time() - begun_s - 0.1 * stats.running, number))
            await asyncio.sleep(0.1)
        return seen

    ages = run(stats_seen())
    assert [age for age, number in ages if number >= 11] == pytest.approx([1.0] * 29, abs=0.11)
    assert all(age >= -1e-9 for age, _ in ages)


# ---- the searches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "best",
    [Contender("distserve", *numbers, plain=True) for numbers in ((1, 8192), (4, 1024), (3, 2048))],
)
def test_the_ladder_finds_the_best_split(monkeypatch: pytest.MonkeyPatch, best: Contender) -> None:
    pretend(monkeypatch, lambda one: 3.0 if one == best else 2.0 - 0.1 * abs(one.prefills - best.prefills))
    found = statics(made("phases-a100", ScenarioSize()), SearchEffort(), map, lambda _: None)
    assert found.split.contenders == (best,)
    assert found.split.rate == pytest.approx(3.0, rel=0.06) and found.split.rate <= 3.0


def test_a_ladder_that_starts_low_climbs_several_rungs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def attained(probe: ScenarioProbe, rate: float, seed: int) -> Attainment:
        rates.append(rate)
        share = float(rate <= 10.0)
        return Attainment(share, share, share, share)

    monkeypatch.setattr(ScenarioProbe, "__call__", attained)
    first, other = splits(2, (2048,))
    best = ladder(made("phases-a100"), Best((first,), 1.0), [other], SearchEffort(rung=0.05), map, lambda _: None)
    assert best.contenders == (other,) and 10.0 / 1.0501 < best.rate <= 10.0
    assert len(rates) < 16  # one by one there are 49


def test_every_router_runs_with_every_view(monkeypatch: pytest.MonkeyPatch) -> None:
    def attained(job: staleness._Job) -> float:
        return 0.1 * job.view.gateways + 0.01 * job.view.stale_s + 0.001 * job.seed

    monkeypatch.setattr(staleness, "_attained", attained)
    made_rows = staleness.study(SMALL, map, lambda _: None)
    assert {(each.routing, each.gateways) for each in made_rows} == {
        *((f"{name} on split 1, chunk 2048", number) for name in ("least-loaded", "slo") for number in (1, 2, 4)),
        *(("ours", number) for number in (1, 4)),
    }
    assert len(made_rows) == 4 * 8
    for each in made_rows:
        mean = 0.1 * each.gateways + 0.01 * each.stale_s
        assert each.kept == pytest.approx((mean, mean + 0.001, mean + 0.002))


def test_a_search_without_success_still_returns_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda _: 0.0)
    found = statics(made("phases-a100", ScenarioSize()), SearchEffort(), map, lambda _: None)
    assert len(found.split.contenders) == 1 and found.rate > 0.0


def all_searched(load: Scenario, effort: SearchEffort) -> SearchResult:
    found = statics(load, effort, map, lambda _: None)
    return searched(jobs_of(load, found, effort), effort, map, lambda _: None)


def test_the_search_finds_the_contenders_goodputs(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"ours": 4.0, "vllm": 1.0, "sarathi": 1.5}
    pretend(monkeypatch, lambda one: 2.5 if one.routing == "random" else most.get(one.name, 2.0))
    effort = SearchEffort(
        tolerance=0.02, rough=0.1, systems=("vllm", "sarathi"), routers=("random", "slo"), finalists=1
    )
    found = all_searched(made("phases-a100"), effort).entries
    assert [each.kind for each in found] == ["ours", "best split", "best colocated", *[SYSTEM] * 2, *[ROUTER] * 2]
    by_name = {each.name.partition(" on ")[0]: each for each in found}
    assert [each.rate for each in found[:3]] == pytest.approx([4.0, 2.0, 2.0], rel=0.02)
    assert found[0].by_seed[0] == found[0].by_seed[2]
    for name, rate in (("sarathi", 1.5), ("random", 2.5)):  # the best of their kind, so with all seeds, and closely
        assert len(by_name[name].by_seed) == 3 and by_name[name].rate == pytest.approx(rate, rel=0.02)
    for name, rate in (("vllm", 1.0), ("slo", 2.0)):
        assert len(by_name[name].by_seed) == 1 and by_name[name].rate == pytest.approx(rate, rel=0.1)


def test_a_contender_that_raises_is_reported_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(one: Contender) -> float:
        if one.name == "ours":
            raise RuntimeError("a worker sulks")
        return 2.0

    pretend(monkeypatch, most)
    found = all_searched(made("phases-a100"), SearchEffort(systems=("vllm",), routers=(), finalists=1))
    assert found.failed == ("ours: RuntimeError: a worker sulks",)
    assert [each.kind for each in found.entries] == ["best split", "best colocated", "system"]


def test_the_best_static_per_phase_attains_the_mean_of_the_best_per_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = {
        "prompts": Contender("distserve", 5, 2048, plain=True),
        "answers": Contender("distserve", 1, 2048, plain=True),
    }
    bad = Contender("distserve", 3, 2048, plain=True)

    def attained(ran: tuple[ScenarioPhase, Contender], _: object) -> Attainment:
        share = 1.0 if good[ran[0].name] == ran[1] else 0.9
        return Attainment(share, share, share, share)

    monkeypatch.setattr(ScenarioProbe, "run", lambda probe, scale, seed: (probe.scenario.phases[0], probe.contender))
    monkeypatch.setattr(per_phase, "attainment", attained)
    load = made("phases-a100", ScenarioSize())
    knowing = PerPhase(load, {name: (one, bad) for name, one in good.items()})
    assert knowing(0.5 * load.rate, 0).both == pytest.approx(1.0)
    half = PerPhase(load, {"prompts": (bad,), "answers": (good["answers"],)})
    arrivals = load.draw(0.5, 0).arrivals
    prompts = sum(each.at_s % 120.0 < 60.0 for each in arrivals) / len(arrivals)
    assert half(0.5 * load.rate, 0).both == pytest.approx(0.9 * prompts + (1.0 - prompts))
    neither = PerPhase(load, {"prompts": (good["answers"],), "answers": (good["prompts"],)})
    assert neither(0.5 * load.rate, 0).both == pytest.approx(0.9)


# ---- runs --------------------------------------------------------------------------------------------------------


def test_a_run_is_reported_by_phase() -> None:
    load = made("phases-a100")
    ran = ScenarioProbe(contender("split:1"), load, None).run(0.6, 0)
    whole, *parts = one.phase_outcomes(ran, load)
    assert whole.requests == sum(each.requests for each in parts) == len(ran.served)
    for each in (whole, *parts):
        lost = each.late + each.slow + each.late_slow + each.rejected + each.failed + each.cut
        assert each.kept == pytest.approx(1.0 - lost / each.requests)
    late = one.phase_outcomes(ran, replace(load, slo=replace(load.slo, ttft_s=1e-6)))[0]
    assert (late.kept, late.late + late.late_slow) == (0.0, late.requests)


@pytest.mark.campaign
def test_a_small_campaign_has_all_its_figures(tmp_path: Path) -> None:
    load = replace(made("phases-a100", ScenarioSize(workers=2, stretch=0.05)), slo=SLO(1.0, 0.06))
    effort = replace(QUICK, systems=("distserve",), routers=("random",))
    result = measure(load, effort, map, lambda _: None)
    assert {each.kind for each in result.entries} == set(KINDS)
    assert all(each.rate >= 0.0 and each.low <= each.rate <= each.high for each in result.entries)
    assert result.timelines[0].name == "ours" and result.timelines[0].workers
    assert all(prompts + others <= 1.01 for bins in result.timelines[0].workers.values() for prompts, others in bins)
    found = Record().with_result(result).with_result(result)
    assert len(found.results) == 1
    record.save(found, tmp_path / "record.json")
    assert record.load(tmp_path / "record.json") == found
    page.write(tmp_path, found)
    text = (tmp_path / page.PAGE).read_text()
    assert "## phases-a100" in text and "**Diptych**" in text and "best static per phase" in text
    if not pictures.missing():
        pictures.draw(tmp_path, found, "png")
        assert (tmp_path / "elastic-phases-a100.png").stat().st_size > 10_000


def test_one_run_from_the_command_line() -> None:
    args = ["--one", "bursts", "--workers", "2", "--stretch", "0.05", "--system", "colocated:512", "--scale", "0.3"]
    ran = CliRunner().invoke(main, [*args, "--stale", "0.5", "--gateways", "2"])
    assert ran.exit_code == 0, ran.output
    assert "colocated, chunk 512 on bursts" in ran.output and "burst " in ran.output
    ran = CliRunner().invoke(main, [*args, "--json"])
    assert json.loads(ran.output)["phases"][0]["requests"] > 0


def test_one_goodput_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda _: 2.0)
    ran = CliRunner().invoke(
        main, ["--one", "bursts", "--search", "--seeds", "2", "--workers", "2", "--processes", "1"]
    )
    assert ran.exit_code == 0, ran.output
    stats_seen = re.search(r"goodput (\S+) requests/s, (\S+) per GPU.*seed: (\S+), (\S+)$", ran.output.strip())
    assert stats_seen is not None
    assert float(stats_seen[1]) == pytest.approx(2.0, rel=0.06) and float(stats_seen[2]) == pytest.approx(
        float(stats_seen[1]) / 8, rel=0.01
    )
    assert stats_seen[3] == stats_seen[4]


@pytest.mark.parametrize("text", ["split", "split:x", "split:1:2:3", "colocated:1:2", "split:-1", "nobody", "split:9"])
def test_an_impossible_system_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        case_of(contender(text), made("phases-a100"))


def test_what_cannot_run_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIPTYCH_SHARED", str(tmp_path))
    for args, words in (
        (["--one", "azure", "--workers", "3"], f"is not under {tmp_path}"),
        (["--one", "bursts", "--scale", "0"], "must be above 0"),
        (["--one", "bursts", "--system", "split:9", "--workers", "3"], "cannot be the prefill pool"),
        (["--recorded", "--out", str(tmp_path)], "run a campaign first"),
        (["--one", "nothing"], "is not one of"),
        (["--recorded", "--again", "ours"], "exclude each other"),
        (["--again", "ours", "--out", str(tmp_path)], "the record lacks any workload"),
        (["--workers", "1"], "is not in the range"),
    ):
        ran = CliRunner().invoke(main, args)
        assert ran.exit_code != 0 and words in ran.output and ran.output.count("Traceback") == 0, ran.output
