"""A failed worker is restarted without end, with growing pauses, and its view shows the failures."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

import cluster.control.replicas as cluster_pool
from cluster.cli.screen import problem_lines, workers_table
from cluster.control.replicas import CRASH_LOOP, MAX_RESTART_PAUSE_S, STEADY_S, pause_s
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import PoolModel, virtual
from cluster.policy.slo_attainment import GatewayAttainment
from cluster.runtime.interface import WorkerOrder
from cluster.runtime.runtime_errors import RuntimeUnavailable
from cluster.serving import Serving, serve
from cluster.spec import Role
from diptych.view import WorkerState, WorkerView
from kvtransfer.open import SharedMemory
from tests.cluster.local import FAST, cluster, completed, generate, request, split_spec
from tests.cluster.processes import FakeServer, Processes, die_and_restart, in_virtual_time
from tests.observe.exposition import exposition
from workers.build import build_worker
from workers.config import WorkerConfig
from workers.engine.executor import Executor
from workers.errors import ModelError, RankLost
from workers.executor.simulated import SimulatedModel, open_simulated, simulated_facts
from workers.server import WorkerServer
from workers.stats import WorkerStats

MODELS = {name: PoolModel(FAST) for name in ("prefill", "decode")}


async def test_a_worker_whose_ranks_did_not_start_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_pool, "START_RETRY_S", 0.2)
    shared, opened = SharedMemory(), Counter[str]()
    facts = simulated_facts(model=SimulatedModel())

    async def open_it(config: WorkerConfig, incarnation: str) -> Executor:
        opened[config.name] += 1
        if config.pool == "decode" and opened[config.name] < 3:
            raise RankLost("rank 1 ended")
        return open_simulated(config, facts, FAST, incarnation, shared)

    def build(order: WorkerOrder) -> WorkerServer:
        config = build_worker(order.config).config  # with a host of its own
        return WorkerServer(config, open_it, heartbeat_s=order.heartbeat_s)

    async with asyncio.timeout(20), cluster(split_spec(), build=build) as subject:
        events = await subject.run(request("a"))
        assert completed(events).transfers
        await subject.settle()
    assert opened == {"prefill-0": 1, "decode-0": 3}


def decode(runtime: Processes) -> WorkerView:
    """As the gateway sees it."""
    return next(each for each in dispatcher(runtime).view.workers if each.name == "decode-0")


def shown(runtime: Processes) -> str:
    """By `diptych status`."""
    screen = Console(width=300, file=StringIO())
    screen.print(workers_table(dispatcher(runtime).view))
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue()


def dispatcher(runtime: Processes) -> Any:
    return next(iter(runtime.services["gateway-0"].target._dispatchers.values()))


def kinds(runtime: Processes) -> list[str]:
    return [each.kind for _, each in dispatcher(runtime).recent().events if each.worker == "decode-0"]


def test_a_failed_restart_is_retried_and_the_recovery_is_reported() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        await asyncio.sleep(STEADY_S)
        runtime.faults["decode-0"] = [RuntimeError("CUDA out of memory")]
        runtime.workers["decode-0"]._mark_unhealthy(RuntimeError("the device was lost"))
        await asyncio.sleep(1.0)
        worker = decode(runtime)
        assert (worker.state, worker.failures, worker.restarts) == (WorkerState.DEAD, 2, 2)
        assert worker.detail == "cannot start: RuntimeError: CUDA out of memory; next start in 10 s"
        assert worker.stats == WorkerStats(), "they were of the process that died"
        assert worker.age_s == pytest.approx(1.0, abs=0.3)
        assert "next start in 10 s; last heard from 1 s ago" in shown(runtime)
        await asyncio.sleep(10.0)
        worker = decode(runtime)
        assert worker.stats.total_blocks and "last heard" not in shown(runtime)
        assert worker.state is WorkerState.READY
        assert worker.detail == "back after 10 s (cannot start: RuntimeError: CUDA out of memory)"
        assert kinds(runtime) == ["lost", "back"]
        await asyncio.sleep(STEADY_S + 1.0)
        assert (decode(runtime).detail, decode(runtime).failures, decode(runtime).restarts) == ("", 0, 2)

    in_virtual_time(scene)


@pytest.mark.parametrize("faults", [1, 2])
def test_an_unexpected_error_at_the_first_start_is_retried(faults: int) -> None:
    async def all_of_it() -> tuple[list[float], list[str], WorkerState]:
        spec, lines = split_spec(1, 1), list[str]()
        runtime = Processes(spec)
        runtime.faults["decode-0"] = [KeyError(f"fault {number}") for number in range(faults)]
        serving = await serve(virtual(spec, MODELS), runtime=runtime, make_server=FakeServer, progress=lines.append)
        try:
            return runtime.started_s["decode-0"], lines, decode(runtime).state
        finally:
            await serving.close()

    starts_s, lines, state = run(all_of_it())
    assert [round(later - sooner) for sooner, later in pairwise(starts_s)] == [5, 10][:faults]
    assert "decode-0: dead (cannot start: KeyError: 'fault 0'; next start in 5 s)" in lines
    assert state is WorkerState.READY


@pytest.mark.parametrize("begun_s", [0.0, 3.0])
def test_a_controller_that_dies_while_the_cluster_starts_finishes_the_start(begun_s: float) -> None:
    async def all_of_it() -> None:
        spec = split_spec(1, 1)
        runtime = Processes(spec)
        runtime.faults["decode-0"] = [KeyError("a fault delays it")]
        starting = asyncio.ensure_future(serve(virtual(spec, MODELS), runtime=runtime, make_server=FakeServer))
        while not runtime.started_s["decode-0"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(begun_s)
        await die_and_restart(runtime.services["controller"], 3.0)
        serving = await starting
        try:
            await asyncio.sleep(10.0)
            assert decode(runtime).state is WorkerState.READY
        finally:
            await serving.close()

    run(all_of_it())


def test_a_first_start_that_the_configuration_makes_impossible_ends_serve() -> None:
    async def all_of_it() -> None:
        spec = split_spec(1, 1)
        runtime = Processes(spec)
        runtime.faults["decode-0"] = [ModelError("config.json is not there")]
        with pytest.raises(ModelError, match=r"config\.json is not there"):
            await serve(virtual(spec, MODELS), runtime=runtime, make_server=FakeServer)
        assert len(runtime.started_s["decode-0"]) == 1

    run(all_of_it())


def test_a_first_start_that_times_out_ends_serve_with_the_reason() -> None:
    async def all_of_it() -> None:
        spec = split_spec(1, 1)
        spec = replace(spec, health=replace(spec.health, start_timeout_s=60.0))
        runtime = Processes(spec)
        runtime.faults["decode-0"] = [KeyError("no such device")] * 9
        with pytest.raises(RuntimeUnavailable, match=r"^decode-0 \(.*KeyError: 'no such device'.*\) not ready within"):
            await serve(virtual(spec, MODELS), runtime=runtime, make_server=FakeServer)

    run(all_of_it())


def test_a_crash_loop_shows_in_view_metrics_and_events_until_it_ends() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        runtime.faults["decode-0"] = [RuntimeError(f"fault {number}") for number in range(4)]
        began_s = asyncio.get_running_loop().time()
        runtime.workers["decode-0"]._mark_unhealthy(RuntimeError("the device was lost"))
        await asyncio.sleep(40.0)
        worker = decode(runtime)
        assert worker.failures == 4 > CRASH_LOOP
        scene = "crash loop, 4 failures in a row, the last: cannot start: RuntimeError: fault 2; next start in 40 s"
        assert worker.detail == scene
        assert kinds(runtime) == ["lost", "crash loop"]
        text = exposition(GatewayAttainment(), "gateway-0", dispatcher(runtime).view)
        assert 'diptych_worker_consecutive_failures{gateway="gateway-0",pool="decode",worker="decode-0"} 4.0' in text
        assert 'diptych_worker_restarts_total{gateway="gateway-0",pool="decode",worker="decode-0"} 4.0' in text
        await asyncio.sleep(200.0)
        starts_s = [round(each - began_s) for each in runtime.started_s["decode-0"][1:]]
        assert starts_s == [0, 10, 30, 70, 150], "at once, then later each time"
        assert decode(runtime).state is WorkerState.READY and kinds(runtime)[-1] == "back"
        assert completed([event async for event in generate(dispatcher(runtime), request("r"))]).transfers

    in_virtual_time(scene)


def test_restart_pauses_double_up_to_a_limit_and_the_first_restart_is_immediate() -> None:
    assert [pause_s(count, died=True) for count in (1, 2, 3, 4)] == [0.0, 1.0, 2.0, 4.0]
    assert [pause_s(count, died=False) for count in (1, 2, 3)] == [5.0, 10.0, 20.0]
    assert pause_s(10**6, died=True) == pause_s(10**6, died=False) == MAX_RESTART_PAUSE_S


def test_a_silent_worker_is_replaced_after_dead_after_s_and_at_most_an_eighth_more() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        await asyncio.sleep(STEADY_S)
        clock, dead_after_s = asyncio.get_running_loop(), serving.spec.health.dead_after_s
        heartbeat_s = serving.spec.health.heartbeat_s
        silent_s = clock.time()  # at most a heartbeat after its last message
        for mailbox in runtime.workers["decode-0"]._subscribers._mailboxes.values():
            mailbox._heartbeat.close()
        await asyncio.sleep(2 * dead_after_s)
        (replaced_s,) = runtime.started_s["decode-0"][1:]
        assert dead_after_s - heartbeat_s <= replaced_s - silent_s <= 9 / 8 * dead_after_s + 2 * heartbeat_s
        assert decode(runtime).detail.startswith("back after")

    in_virtual_time(scene)


@pytest.mark.full
async def test_a_blocked_event_loop_does_not_count_as_a_worker_death() -> None:
    """Gateway, controller and workers share one loop here: all of them find that they were away."""
    async with cluster(split_spec(1, 2, kv_blocks=600)) as subject:
        streams = [
            asyncio.ensure_future(subject.run(request(f"r{index}", 60, max_tokens=150, ignore_eos=True)))
            for index in range(6)
        ]
        await asyncio.sleep(0.2)
        before = {name: worker.incarnation for name, worker in subject.workers.items()}
        for seconds in (2.2, 1.2):  # dead_after_s is 1 s, a lease 2 s
            block(seconds)
            await asyncio.sleep(0.1)
        assert [completed(events).attempts for events in await asyncio.gather(*streams)] == [1] * 6
        assert {name: worker.incarnation for name, worker in subject.workers.items()} == before
        assert not any(worker.restarts for worker in subject.controller.view().workers)


def block(seconds: float) -> None:
    time.sleep(seconds)


async def test_requests_served_by_another_role_are_counted_and_status_shows_it() -> None:
    async with cluster(split_spec(1, 1)) as subject:
        assert completed(await subject.run(request("a"))).transfers
        assert subject.dispatcher.slo_attainment().fallbacks == (("prefill", 0), ("decode", 0))
        assert problem_lines(subject.dispatcher.view) == []
        stays_away = asyncio.get_running_loop().create_future()
        runtime: Any = subject.runtime
        runtime.restart_worker = lambda *scene: stays_away
        subject.workers["prefill-0"]._mark_unhealthy(RuntimeError("the device was lost"))
        await subject.until(lambda view: not view.ready(Role.PREFILL))
        assert not completed(await subject.run(request("b"))).transfers
        assert subject.dispatcher.slo_attainment().fallbacks == (("prefill", 1), ("decode", 0))
        assert problem_lines(subject.dispatcher.view) == [
            "pool prefill has no ready worker: other pools serve its requests"
        ]
        stays_away.cancel()
