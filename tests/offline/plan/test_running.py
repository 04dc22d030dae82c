"""Advice for a running cluster: from the load that its gateway remembers and the costs that were measured on it."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.offline.plan.request import PlanError
from cluster.offline.plan.running import (
    Arrangement,
    RunningCluster,
    advice,
    advice_lines,
    arrangements,
    observed,
    observed_load,
    try_all,
)
from cluster.offline.scoring.figures import Attainment
from cluster.offline.workload.arrivals import Arrival, Workload
from cluster.spec import ClusterSpec, Role
from diptych.history import Window
from tests.offline.profile.served import COST, served, spec
from workers.costs import LinearCost
from workers.profiles.measured import ClusterProfile, LinkProfile, PoolProfile, save
from workers.request import SLO

SLOW_PROMPTS = LinearCost(1e-3, 2e-3, 0.0, 1e-4, 0.0)
NOW = Arrangement(((Role.DECODE, "decode", 2), (Role.PREFILL, "prefill", 1)))


def profile(*, cost: LinearCost = COST, decode_tensor: int = 1, linked: bool = True) -> ClusterProfile:
    links = (LinkProfile("prefill", "decode", "nixl", 1e-4, 1e9),) if linked else ()
    pools = PoolProfile("prefill", 1, 1, cost), PoolProfile("decode", decode_tensor, 1, cost)
    return ClusterProfile("c", "m", "2026-01-02", "2 cores", "python 3", 8192, 49152, pools, links, (), 4096)


def running(
    measured: ClusterProfile, rate: float, prompt: int = 100, output: int = 8, now: Arrangement = NOW
) -> RunningCluster:
    load = Workload("load", tuple(Arrival(number / rate, prompt, output) for number in range(120)))
    kv = {"prefill": 16_000, "decode": 16_000}
    return RunningCluster(measured, load, now, kv, SLO(0.5, 0.05), 0.9)


def test_arrangements_begin_with_the_current_one_and_differ_by_one_worker_at_most() -> None:
    found = arrangements(running(profile(), 1.0))
    assert found[0] == NOW
    assert len(set(found)) == len(found)
    assert {each.ranks(profile()) for each in found} == {2, 3, 4}
    assert any(len(each.parts) == 1 for each in found)


def test_without_a_measured_link_no_split_is_tried() -> None:
    mixed = Arrangement(((Role.MIXED, "prefill", 2),))
    found = arrangements(running(profile(linked=False), 1.0, now=mixed))
    assert all(len(each.parts) == 1 for each in found)


def test_roles_change_when_prompts_wait_and_decodes_idle() -> None:
    crowded = running(profile(cost=SLOW_PROMPTS), 7.0)
    tried = list(try_all(crowded))
    assert tried[0].attained.both < 0.9
    told = advice(crowded, tried)
    assert told.startswith("Change roles"), told


def test_a_calm_cluster_is_told_that_fewer_workers_do() -> None:
    calm = running(profile(), 1.0)
    told = advice(calm, list(try_all(calm)))
    assert told.startswith("Change") and "replicas" in told


def test_a_load_that_nothing_serves_names_the_closest() -> None:
    crushed = running(profile(cost=SLOW_PROMPTS), 100.0)
    assert advice(crushed, list(try_all(crushed))).startswith("No arrangement")
    assert advice(crushed, []).startswith("Not decided")


def test_there_is_no_advice_from_a_simulation_that_misses_what_was_measured() -> None:
    """As after `diptych profile` on a busy machine."""
    calm = running(profile(), 1.0)
    tried = list(try_all(calm))
    told = advice(replace(calm, measured=Attainment(0.5, 0.5, 0.5, 1.0)), tried)
    assert told.startswith("No advice: 50.0% of requests met the SLO, but 100.0% do in the simulation"), told
    alike = replace(calm, measured=Attainment(1.0, 0.95, 0.95, 1.0))
    assert advice(alike, tried) == advice(calm, tried)
    assert "measured: 95.0% meet both (TTFT 100.0%, TPOT 95.0%); simulated:" in advice_lines(alike, tried)


def test_a_measured_parallel_setting_is_tried_for_the_other_role() -> None:
    found = arrangements(running(profile(decode_tensor=2), 1.0))
    kinds = {(role, pool) for each in found for role, pool, _ in each.parts}
    assert (Role.PREFILL, "decode") in kinds and (Role.DECODE, "prefill") in kinds


def test_too_few_requests_are_an_error() -> None:
    with pytest.raises(PlanError, match=r"0 finished requests.*--last"):
        observed_load(Window())


def two_decodes() -> ClusterSpec:
    made = spec()
    return replace(
        made, pools=tuple(replace(pool, replicas=2) if pool.role is Role.DECODE else pool for pool in made.pools)
    )


@pytest.mark.full
async def test_a_real_cluster_is_advised_from_its_own_load(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    save(profile(), file)
    async with served(two_decodes()) as (client, _):
        await asyncio.gather(*(client.complete(tuple(range(40)), max_tokens=4) for _ in range(12)))
        profiled = ["profile", "--endpoint", client.endpoint, "--rounds", "1", "-o", str(tmp_path / "profiled.json")]
        result = await asyncio.to_thread(CliRunner().invoke, main, profiled)
        assert result.exit_code == 0, result.output
        _, window = await client.trace(last_s=600.0)
        assert len(window.traces) > 12
        view = (await client.status()).view
        found = observed(view, window, profile(), SLO(5.0, 1.0), 0.9)
        assert len(found.load.arrivals) == 12
        assert found.load.arrivals[0].prompt_tokens == 40 and found.load.arrivals[0].output_tokens == 4
        assert found.now == NOW
        words = ["--ttft", "5", "--tpot", "1", "--processes", "1", "--profile", str(file), "--json"]
        words += ["--hardware", "l4", "--price", "decode=0.25"]
        command = ["plan", "--from-cluster", client.endpoint, *words]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["load"]["requests"] == 12 and value["measured"]["both"] == 1.0 and value["complete"]
    assert value["advice"].startswith("Change") and value["tried"][0]["attained"]["both"] == 1.0
    assert value["prices"] == {"prefill": 0.49, "decode": 0.25}
    paid, seconds = value["tried"][0]["cost"], value["load"]["seconds"]
    assert paid["dollars_h"] == 0.49 + 2 * 0.25
    assert paid["dollars_per_million_output_tokens"] == pytest.approx(0.99 / 3600 * seconds / (12 * 4) * 1e6)
