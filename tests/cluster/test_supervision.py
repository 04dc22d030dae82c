"""Background tasks survive exceptions, and a gateway that hangs affects only its own streams."""

import asyncio
import gc
import logging
from itertools import pairwise
from typing import Any, Never

import pytest

from cluster.cli.screen import problem_lines
from cluster.control.supervision import (
    ANSWER_S,
    CONTROLLER_HUNG_S,
    HUNG_S,
    MAX_PAUSE_S,
    ORPHAN_AFTER_S,
    POLL_S,
    Failures,
    supervised,
)
from cluster.events import Completed
from cluster.frontend.context import GatewayContext
from cluster.offline.sim.clock import run
from cluster.runtime.runtime_errors import WorkerGone
from cluster.serving import GatewayService, Serving, serve
from diptych.status import VIEW
from diptych.view import ClusterView, GatewayState, GatewayView, TaskFailures, WorkerState
from tests.cluster.local import generate, request, split_spec
from tests.cluster.processes import FakeServer, Processes, in_virtual_time
from workers.errors import ModelError


def test_a_failing_task_is_logged_and_counted_and_continues_after_growing_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times: list[float] = []

    async def work() -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) in (9, 10):
            await asyncio.sleep(5.0)
            return
        raise KeyError("nobody foresaw this")

    async def story() -> tuple[tuple[str, int], ...]:
        failures = Failures()
        task = asyncio.ensure_future(supervised("counting", work, failures))
        await asyncio.sleep(300.0)
        assert not task.done()
        task.cancel()
        return failures.counts()

    with caplog.at_level(logging.ERROR):
        ((task, count),) = run(story())
    pauses = [later - sooner for sooner, later in pairwise(times)]
    assert pauses[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE_S, MAX_PAUSE_S]
    assert pauses[8:12] == [5.0, 5.0, 1.0, 2.0], "work that returned ends the row"
    assert task == "counting" and count == len(times) - 2
    assert "nobody foresaw this" in caplog.text


OPEN = GatewayView("gateway-1", GatewayState.OPEN)


def states(view: ClusterView) -> dict[str, GatewayState]:
    return {each.name: each.state for each in view.served_gateways}


async def seen(runtime: Processes, gateway: str) -> ClusterView:
    view: ClusterView = await runtime.services[gateway].call("view")
    return view


async def serves(runtime: Processes, gateway: str) -> None:
    """A request through this gateway has its answer, of workers that were never replaced."""
    dispatcher = next(iter(runtime.services[gateway].target._dispatchers.values()))
    *_, last = [event async for event in generate(dispatcher, request("r"), deadline_s=10.0)]
    assert isinstance(last, Completed) and last.attempts == 1
    view = dispatcher.view
    assert [(each.state, each.restarts) for each in view.workers] == [(WorkerState.READY, 0)] * 2


def test_a_frozen_gateway_is_replaced_and_disturbs_no_other() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        await serves(runtime, "gateway-0")
        runtime.services["gateway-0"].thawed.clear()
        await asyncio.sleep(ORPHAN_AFTER_S - 2.0)
        assert states(await seen(runtime, "gateway-1")) == {
            "gateway-0": GatewayState.SILENT,
            "gateway-1": GatewayState.OPEN,
        }
        assert not runtime.replaced
        await asyncio.sleep(HUNG_S + ANSWER_S + POLL_S - ORPHAN_AFTER_S + 6.0)
        assert runtime.replaced == ["gateway-0"]
        for gateway in ("gateway-1", "gateway-0"):
            await serves(runtime, gateway)
        (replaced, other) = (await seen(runtime, "gateway-1")).served_gateways
        assert (replaced.state, replaced.restarts, replaced.silences, replaced.detail) == (GatewayState.OPEN, 1, 1, "")
        assert (other.restarts, other.silences) == (0, 0)
        assert not serving._closed.is_set()

    in_virtual_time(scene, gateways=2)


def test_a_gateway_that_answers_again_in_time_continues() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        frozen = runtime.services["gateway-0"]
        before = frozen.target
        frozen.thawed.clear()
        await asyncio.sleep(HUNG_S - ANSWER_S)
        frozen.thawed.set()
        await asyncio.sleep(2 * HUNG_S)
        assert frozen.target is before and not runtime.replaced
        await serves(runtime, "gateway-0")
        (gateway,) = (await seen(runtime, "gateway-0")).served_gateways
        assert (gateway.state, gateway.restarts, gateway.silences) == (GatewayState.OPEN, 0, 1)

    in_virtual_time(scene)


@pytest.mark.parametrize("fault", [ModelError("the hub is away"), OSError("port in use"), KeyError("unforeseen")])
def test_a_gateway_that_cannot_open_is_retried_and_the_cluster_continues(fault: Exception) -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        runtime.services["gateway-0"].fault = fault
        await asyncio.sleep(3 * ORPHAN_AFTER_S)
        view = await seen(runtime, "gateway-1")
        assert states(view) == {"gateway-0": GatewayState.STARTING, "gateway-1": GatewayState.OPEN}
        assert type(fault).__name__ in view.served_gateways[0].detail
        ((process, task, count),) = [(each.process, each.task, each.count) for each in view.failures]
        assert (process, task) == ("server", "supervising gateway-0") and count > 3
        await serves(runtime, "gateway-1")
        runtime.services["gateway-0"].fault = None
        await asyncio.sleep(MAX_PAUSE_S + POLL_S + 3.0)
        assert set(states(await seen(runtime, "gateway-1")).values()) == {GatewayState.OPEN}

    in_virtual_time(scene, gateways=2)


def test_a_controller_that_raises_is_called_again() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        controller = runtime.services["controller"].target
        right, failed = controller.keep_alive, 0

        async def wrong(*args: Any) -> Never:
            nonlocal failed
            failed += 1
            controller._reset_orphan_timer()
            raise ZeroDivisionError("nobody foresaw this")

        controller.keep_alive = wrong
        await asyncio.sleep(3 * ORPHAN_AFTER_S)
        controller.keep_alive = right
        await asyncio.sleep(6.0)
        assert failed > 10 and not serving._closed.is_set()
        await serves(runtime, "gateway-0")

    in_virtual_time(scene)


def test_a_frozen_controller_is_replaced_and_finds_the_running_workers() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        await asyncio.sleep(5.0)
        before = {name: worker.incarnation for name, worker in runtime.workers.items()}
        runtime.services["controller"].thawed.clear()
        await asyncio.sleep(CONTROLLER_HUNG_S - 1.0)
        await serves(runtime, "gateway-0")
        assert not runtime.replaced
        await asyncio.sleep(2 * ORPHAN_AFTER_S)
        assert runtime.replaced == ["controller"] and not serving._closed.is_set()
        assert {name: worker.incarnation for name, worker in runtime.workers.items()} == before
        await serves(runtime, "gateway-0")

    in_virtual_time(scene)


def test_a_controller_that_answers_again_in_time_continues() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        frozen = runtime.services["controller"]
        before = frozen.target
        frozen.thawed.clear()
        await asyncio.sleep(CONTROLLER_HUNG_S - 4.0)
        frozen.thawed.set()
        await asyncio.sleep(2 * ORPHAN_AFTER_S)
        assert frozen.target is before and not runtime.replaced
        await serves(runtime, "gateway-0")

    in_virtual_time(scene)


def test_a_server_ends_when_its_controller_is_gone_for_good() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        async def gone(*args: Any) -> Never:
            raise WorkerGone("it died")

        runtime.services["controller"].target.keep_alive = gone
        began_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(2 * ORPHAN_AFTER_S):
            await serving.wait_closed()
        assert asyncio.get_running_loop().time() - began_s >= ORPHAN_AFTER_S - 3.0

    in_virtual_time(scene)


def test_a_cluster_without_its_server_ends() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        assert serving._keep_alive is not None
        serving._keep_alive.close()
        await asyncio.sleep(ORPHAN_AFTER_S - 3.0)
        assert len(runtime.workers) == 2
        await asyncio.sleep(8.0)
        assert not runtime.workers

    in_virtual_time(scene)


def test_status_shows_failed_gateways_and_tasks() -> None:
    served = (GatewayView("gateway-0", GatewayState.SILENT, 2, 1, "no answer for 5 s"), OPEN)
    failures = (TaskFailures("controller", "linking workers", 3),)
    view = ClusterView(3, "llm", None, (), served_gateways=served, failures=failures)
    assert problem_lines(VIEW.decode(VIEW.encode(view))) == [
        "gateway-0 is silent: no answer for 5 s; 2 restarts, 1 missed health check",
        "controller: linking workers failed 3 times and continued; see its log",
    ]
    assert VIEW.decode(VIEW.encode(view)).served_gateways == served
    assert problem_lines(ClusterView(3, "llm", None, (), served_gateways=(OPEN,))) == []


def test_opening_a_gateway_twice_opens_it_once() -> None:
    """Whoever gave up waiting asks again, while the first call is still at work."""

    async def scene(serving: Serving, runtime: Processes) -> None:
        made: list[FakeServer] = []

        def make_server(context: GatewayContext) -> FakeServer:
            made.append(FakeServer(context))
            return made[-1]

        models = serving._gateway_managers[0]._opening[0]
        service = GatewayService("gateway-9", serving.spec, runtime.services["controller"], make_server)
        await asyncio.gather(service.open(models, 0), service.open(models, 0))
        assert len(made) == 1
        await service.close(0.0)

    in_virtual_time(scene)


def test_a_start_that_is_cancelled_while_gateways_prepare_leaves_no_unread_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[str] = []

    async def forever(*_: object) -> Never:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        preparing = asyncio.Event()

        async def prepare(_: GatewayService) -> None:
            preparing.set()
            await forever()

        monkeypatch.setattr(GatewayService, "prepare", prepare)
        monkeypatch.setattr(Serving, "_ready", forever)
        spec = split_spec(1, 1, backends=("simulated",))
        starting = asyncio.create_task(serve(spec, runtime=Processes(spec), make_server=FakeServer))
        await preparing.wait()
        starting.cancel()
        await asyncio.wait([starting])
        del starting
        gc.collect()

    run(story())
    assert not reported
