"""Workers join and leave while the cluster serves: no request is lost, and no worker is left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest

import cluster.control.replicas as cluster_pool
from cluster.control.changes import ChangeRefused, ControllerState, StaleRevision, UnknownMember
from cluster.control.controller import Controller
from cluster.control.replicas import ReplicaContext, ReplicaManager, is_empty
from cluster.events import Event
from cluster.offline.sim.clock import run
from cluster.runtime.interface import WorkerHandle, WorkerOrder
from cluster.runtime.local import LocalRuntime
from cluster.runtime.runtime_errors import RuntimeUnavailable, WorkerGone
from cluster.spec import PoolSpec, Resources, Role, SpecError
from cluster.spec_file import parse_spec
from diptych.view import Adapter, ClusterView, WorkerState
from kvtransfer.errors import PeerLost
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import PeerAddress
from tests.cluster.local import (
    FAST,
    Cluster,
    cluster,
    completed,
    generate,
    in_virtual_time,
    request,
    split_spec,
    tokens_of,
)
from workers.build import build_worker
from workers.config import WorkerConfig
from workers.transfer.peer_links import PeerLinks


def names(view: ClusterView, *states: WorkerState) -> list[str]:
    return [each.name for each in view.workers if not states or each.state in states]


def state_of(view: ClusterView, worker: str) -> WorkerState | None:
    return next((each.state for each in view.workers if each.name == worker), None)


def ready(*workers: str) -> Callable[[ClusterView], bool]:
    return lambda view: names(view, WorkerState.READY) == list(workers)


def only(*workers: str) -> Callable[[ClusterView], bool]:
    return lambda view: names(view) == list(workers)


async def begun(subject: Cluster, count: int, max_tokens: int) -> list["asyncio.Task[list[Event]]"]:
    """Requests that stream already."""
    first = [asyncio.Event() for _ in range(count)]

    async def stream(index: int) -> list[Event]:
        events = []
        asked = request(f"r{index}", max_tokens=max_tokens)
        async for event in generate(subject.dispatcher, asked):
            events.append(event)
            if tokens_of(events):
                first[index].set()
        return events

    tasks = [asyncio.ensure_future(stream(index)) for index in range(count)]
    await asyncio.gather(*(each.wait() for each in first))
    return tasks


async def known_empty(controller: Controller) -> None:
    """Wait until the controller has heard that nobody has work: statistics come with the next message."""
    async with asyncio.timeout(20):
        while not all(is_empty(each.stats) for each in controller.view().workers):
            await asyncio.sleep(0.02)


@in_virtual_time
async def test_a_drained_worker_takes_no_new_work_and_stops_when_empty() -> None:
    async with cluster(split_spec(1, 2)) as subject:
        streams = await begun(subject, 4, max_tokens=150)
        revision = await subject.controller.drain("decode-0")
        view = await subject.until(lambda view: state_of(view, "decode-0") is WorkerState.DRAINING)
        assert view.revision >= revision and {pool.name: pool.wanted for pool in view.pools} == {
            "prefill": 1,
            "decode": 1,
        }
        assert await subject.controller.drain("decode-0") == subject.controller.view().revision, "twice is once"
        with pytest.raises(ChangeRefused, match="draining"):
            await subject.controller.flip("decode-0", Role.PREFILL)
        for n in range(3):
            ended = completed(await subject.run(request(f"n{n}", first=40 * n + 40)))
            assert ended.attempts == 1
        for events in await asyncio.gather(*streams):
            assert len(tokens_of(events)) == 150
            assert completed(events).attempts == 1
        view = await subject.until(only("prefill-0", "decode-1"))
        assert not any("decode-0" in (link.owner, link.reader) for link in view.links)
        await subject.settle()
        assert list(subject.workers) == ["prefill-0", "decode-1"], "it was stopped"


@in_virtual_time
async def test_requests_left_at_the_drain_deadline_fail_over_without_losing_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(split_spec(1, 2)) as subject:
        meet = PeerLinks.meet

        async def meet_others(self: PeerLinks, peer: PeerAddress, **options: bool) -> Any:
            if peer.worker == "decode-1":
                raise PeerLost("no way from decode-1")
            return await meet(self, peer, **options)

        monkeypatch.setattr(PeerLinks, "meet", meet_others)  # so that no decode can leave decode-1
        streams = await begun(subject, 4, max_tokens=180)
        await subject.controller.drain("decode-1", deadline_s=0.05)
        await subject.until(only("prefill-0", "decode-0"))
        received = await asyncio.gather(*streams)
        assert {completed(events).attempts for events in received} == {1, 2}
        for index, events in enumerate(received):
            assert tokens_of(events) == tokens_of(await subject.run(request(f"r{index}", max_tokens=180)))
        await subject.settle()


@in_virtual_time
async def test_a_pool_grows_and_shrinks_and_reuses_free_names() -> None:
    async with cluster(split_spec(1, 1)) as subject:
        await subject.controller.scale("decode", 3)
        view = await subject.until(ready("prefill-0", "decode-0", "decode-1", "decode-2"))
        assert all(view.linked("prefill-0", f"decode-{index}") for index in range(3))
        received = await asyncio.gather(
            *(subject.run(request(f"g{n}", first=30 * n + 1, max_tokens=60)) for n in range(9))
        )
        assert all(completed(events).attempts == 1 for events in received)
        await known_empty(subject.controller)
        await subject.controller.scale("decode", 2)
        assert state_of(subject.controller.view(), "decode-2") is WorkerState.DRAINING, "the latest of equals"
        await subject.controller.scale("decode", 3)
        view = await subject.until(only("prefill-0", "decode-0", "decode-1", "decode-3"))
        await subject.controller.scale("decode", 4)
        await subject.until(ready("prefill-0", "decode-0", "decode-1", "decode-2", "decode-3"))
        await subject.settle()


@in_virtual_time
async def test_the_workers_with_the_least_work_are_removed() -> None:
    async with cluster(split_spec(1, 3)) as subject:
        streams = await begun(subject, 2, max_tokens=300)
        await subject.controller.scale("decode", 2)
        assert state_of(subject.controller.view(), "decode-2") is WorkerState.DRAINING
        assert all(completed(events).attempts == 1 for events in await asyncio.gather(*streams))


@in_virtual_time
async def test_changes_beyond_bounds_and_floors_are_refused_with_the_reason() -> None:
    spec = split_spec(1, 1)
    decode = replace(spec.pools[1], min_replicas=1, max_replicas=2)
    async with cluster(replace(spec, pools=(spec.pools[0], decode))) as subject:
        control, before = subject.controller, subject.controller.view().revision
        with pytest.raises(ChangeRefused, match=r"pool decode has 1 workers and would have 3.*between 1 and 2"):
            await control.scale("decode", 3)
        with pytest.raises(ChangeRefused, match=r"would have 0.*between 1 and 2"):
            await control.drain("decode-0")
        with pytest.raises(ChangeRefused, match=r"elastic\.floors\.prefill is 1"):
            await control.drain("prefill-0")
        with pytest.raises(ChangeRefused, match=r"elastic\.floors\.prefill is 1"):
            await control.scale("prefill", 0)
        with pytest.raises(UnknownMember, match=r"no pool 'mixed'; there are prefill, decode"):
            await control.scale("mixed", 1)
        with pytest.raises(UnknownMember, match=r"there are prefill-0, decode-0"):
            await control.drain("decode-9")
        with pytest.raises(StaleRevision, match=r"revision 1 was expected"):
            await control.scale("decode", 2, 1)
        assert control.view().revision == before, "what is refused changes nothing"
        assert await control.scale("decode", 1) == before, "nothing to do is no change"


@in_virtual_time
async def test_a_worker_without_room_shows_it_and_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_pool, "START_RETRY_S", 0.1)
    async with cluster(split_spec(1, 1)) as subject:
        start, full = subject.runtime.start_worker, asyncio.Event()

        async def start_when_free(order: WorkerOrder) -> WorkerHandle:
            if not full.is_set():
                raise RuntimeUnavailable(f"no room for {order.config.name}")
            return await start(order)

        monkeypatch.setattr(subject.runtime, "start_worker", start_when_free)
        await subject.controller.scale("decode", 2)
        view = await subject.until(lambda view: any("no room for decode-1" in each.detail for each in view.workers))
        assert state_of(view, "decode-1") is WorkerState.STARTING
        assert completed(await subject.run(request("a"))).attempts == 1
        full.set()
        view = await subject.until(ready("prefill-0", "decode-0", "decode-1"))
        assert not any(each.detail for each in view.workers)


def test_a_worker_without_room_is_retried_with_doubling_pauses() -> None:
    """In virtual time: it asks, is refused at once, and says all the while what it waits for."""

    async def asked() -> list[float]:
        clock, times = asyncio.get_running_loop(), []

        class Full(LocalRuntime):
            async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
                times.append(clock.time())
                raise RuntimeUnavailable("no room")

        async def preflight(replica: ReplicaManager) -> None:
            raise AssertionError

        wanted = Resources(cpu=2, custom={"decode": 1})
        order = WorkerOrder(WorkerConfig("decode-1", "decode", "simulated"), wanted, 1.0, 10.0)
        context = ReplicaContext(Full(), 10.0, preflight, lambda name: None)
        replica = ReplicaManager(PoolSpec("decode", Role.DECODE), order, context, required=False)
        replica.start()
        await asyncio.sleep(2000.0)
        assert replica.view.trouble == "waits for a node: {CPU: 2, decode: 1}; no room"
        await replica.end(0.0)
        assert not replica.view.waits_for
        return times

    times = run(asked())
    pauses = [later - sooner for sooner, later in pairwise(times)]
    assert pauses[:6] == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0] and set(pauses[6:]) == {300.0}


@in_virtual_time
async def test_a_worker_that_is_being_placed_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(split_spec(1, 1)) as subject:
        placing, given_up = asyncio.Event(), asyncio.Event()

        async def place_for_ever(order: WorkerOrder) -> WorkerHandle:
            placing.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                given_up.set()
            raise AssertionError

        monkeypatch.setattr(subject.runtime, "start_worker", place_for_ever)
        await subject.controller.scale("decode", 2)
        await placing.wait()
        await subject.controller.scale("decode", 1)
        await subject.until(only("prefill-0", "decode-0"))
        await asyncio.wait_for(given_up.wait(), 5.0)


@in_virtual_time
async def test_a_worker_that_dies_while_it_leaves_stays_dead() -> None:
    async with cluster(split_spec(1, 2)) as subject:
        streams = await begun(subject, 4, max_tokens=400)
        await subject.controller.drain("decode-1")
        subject.workers["decode-1"]._mark_unhealthy(RuntimeError("a test"))
        await subject.until(only("prefill-0", "decode-0"))
        assert all(len(tokens_of(events)) == 400 for events in await asyncio.gather(*streams))
        assert list(subject.workers) == ["prefill-0", "decode-0"]


class Surviving(LocalRuntime):
    """As under Ray: a worker outlives its controller, and is found by its name."""

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        known = self.handles.get(order.config.name)
        return cast(WorkerHandle, known) if known else await super().start_worker(order)


def surviving() -> Surviving:
    shared = SharedMemory()
    return Surviving(lambda order: build_worker(order.config, heartbeat_s=0.05, shared=shared, cost=FAST))


async def crash(controller: Controller) -> None:
    """Its process is gone; its workers are not."""
    assert controller._relinking is not None
    tasks = [controller._relinking, *controller._leaving.values()]
    tasks += [replica._task for replica in controller._replicas.values() if replica._task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def until(controller: Controller, is_so: Callable[[ClusterView], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so(view := controller.view()):
            await controller.members(view.revision, 5.0)


ADAPTER = Adapter("sql", "simulated", "/models/sql", "3f", 1000)


@in_virtual_time
async def test_a_restarted_controller_gets_workers_roles_and_adapters() -> None:
    spec, runtime = split_spec(1, 2), surviving()
    first = Controller(spec, runtime, "secret")
    await first.start()
    await first.scale("decode", 4)
    await first.load_adapter(ADAPTER)
    await until(first, ready("prefill-0", "decode-0", "decode-1", "decode-2", "decode-3"))
    await first.flip("decode-2", Role.PREFILL)
    await first.drain("decode-1")
    await until(first, lambda view: "decode-1" not in names(view))
    await first.drain("decode-0", deadline_s=30.0)
    memory = await first.keep_alive(0, 1.0)
    assert isinstance(memory, ControllerState)
    await crash(first)
    incarnations = {name: worker.incarnation for name, worker in runtime.workers.items()}
    second = Controller(spec, runtime, "secret")
    try:
        assert await second.keep_alive(0, 0.0) is None, "it says that it knows nothing"
        asking = asyncio.ensure_future(second.members(memory.revision, 5.0))
        await asyncio.sleep(0)
        await second.start(memory)
        membership = await asking
        assert membership.revision > memory.revision and membership.view.adapters == (ADAPTER,)
        assert [each.name for each in membership.view.workers] == ["prefill-0", "decode-0", "decode-2", "decode-3"]
        await until(second, ready("prefill-0", "decode-2", "decode-3"))
        roles = {each.name: each.role for each in second.view().workers}
        assert roles["decode-2"] is Role.PREFILL and roles["decode-3"] is Role.DECODE
        await until(second, only("prefill-0", "decode-2", "decode-3"))
        left = {name: worker.incarnation for name, worker in runtime.workers.items()}
        assert left == {name: incarnations[name] for name in ("prefill-0", "decode-2", "decode-3")}
    finally:
        await second.stop()
    assert not runtime.workers


async def test_a_restarted_controller_makes_no_change_before_it_knows_the_cluster() -> None:
    """It would find no worker to flip or drain, and start workers that the cluster has."""
    controller = Controller(split_spec(1, 2), surviving(), "secret")
    changes: list[Callable[[], Awaitable[int]]] = [
        lambda: controller.scale("decode", 3),
        lambda: controller.flip("decode-0", Role.PREFILL),
        lambda: controller.drain("decode-0"),
        lambda: controller.load_adapter(ADAPTER),
        lambda: controller.drain_workers(["decode-0"], 1.0),
    ]
    for change in changes:
        with pytest.raises(WorkerGone, match="has not begun"):
            await change()
    await controller.start()
    try:
        await until(controller, ready("prefill-0", "decode-0", "decode-1"))
        await controller.scale("decode", 3)
    finally:
        await controller.stop()


def pools(replicas: object, **more: object) -> dict[str, object]:
    return {"model": "m", "pools": [{"name": "mixed", "role": "mixed", "replicas": replicas, **more}]}


def test_replicas_are_a_number_or_bounds() -> None:
    def parsed(replicas: object, **more: object) -> tuple[int, tuple[int, int]]:
        pool = parse_spec(pools(replicas, **more)).pools[0]
        return pool.replicas, pool.bounds

    assert parsed(2) == (2, (2, 2))
    assert parsed({"min": 1, "max": 4}) == (1, (1, 4))
    assert parsed(2, min_replicas=1, max_replicas=4) == (2, (1, 4))


def test_a_bare_yaml_off_is_a_mode() -> None:
    assert parse_spec(pools(1) | {"elastic": {"mode": False}}).elastic.mode == "off"
    with pytest.raises(SpecError, match=r"elastic\.mode"):
        parse_spec(pools(1) | {"elastic": {"mode": True}})
    with pytest.raises(SpecError, match="elastic: mode 'yes' is not one of off, advise, act"):
        parse_spec(pools(1) | {"elastic": {"mode": "yes"}})


@pytest.mark.parametrize(
    ("replicas", "more", "message"),
    [
        ({"min": 1}, {}, r"pools\[0\]\.replicas: has only min; write replicas: \{min: 1, max: 4\}"),
        ({"min": 1, "maks": 2}, {}, r"pools\[0\]\.replicas\.maks: unknown key"),
        ({"min": "1", "max": 2}, {}, r"pools\[0\]\.replicas\.min: Expected int, got str"),
        ({"min": True, "max": 2}, {}, r"replicas\.min: Expected int, got bool"),
        ({"min": 3, "max": 2}, {}, r"min 3 and max 2"),
        ({"min": -1, "max": 2}, {}, r"replicas is -1"),
        ({"min": 1, "max": 5000}, {}, r"max <= 1024"),
        ({"min": 0, "max": 2}, {}, r"no worker in any of them"),
        ({"min": 1, "max": 2}, {"max_replicas": 3}, r"max_replicas: replicas has bounds already"),
        (1, {"max_replicas": 3}, r"come together"),
        (5, {"min_replicas": 1, "max_replicas": 3}, r"replicas is 5, min 1 and max 3"),
    ],
)
def test_bad_bounds_are_named(replicas: object, more: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(pools(replicas, **more))


@in_virtual_time
async def test_the_workers_and_streams_of_a_leaving_node_move() -> None:
    spec = split_spec(1, 2)
    async with cluster(replace(spec, elastic=replace(spec.elastic, floors={"prefill": 1, "decode": 2}))) as subject:
        streams = await begun(subject, 4, max_tokens=150)
        await subject.controller.flip("decode-1", Role.MIXED)
        await subject.controller.drain_workers(["decode-1", "nobody-7"], 30.0)
        view = await subject.until(lambda view: state_of(view, "decode-1") is WorkerState.DRAINING)
        assert {pool.name: pool.wanted for pool in view.pools} == {"prefill": 1, "decode": 2}, (
            "floors hold no node back"
        )
        await subject.controller.drain_workers(["decode-1"], 30.0)
        assert len(names(subject.controller.view())) == 4, "twice is once"
        for events in await asyncio.gather(*streams):
            assert len(tokens_of(events)) == 150
            assert completed(events).attempts == 1
        view = await subject.until(only("prefill-0", "decode-0", "decode-2"))
        assert [each.role for each in view.workers][-1] is Role.MIXED, "the newcomer does what the old one did"
        await subject.settle()
        assert set(subject.workers) == {"prefill-0", "decode-0", "decode-2"}


@in_virtual_time
async def test_another_pool_serves_while_the_only_worker_is_replaced() -> None:
    async with cluster(split_spec(1, 1)) as subject:
        streams = await begun(subject, 3, max_tokens=150)
        await subject.controller.drain_workers(["decode-0"], 30.0)
        during = await asyncio.gather(*(subject.run(request(f"n{n}", first=40 * n + 40)) for n in range(3)))
        assert all(completed(events).attempts == 1 for events in [*during, *await asyncio.gather(*streams)])
        await subject.until(only("prefill-0", "decode-1"))
        await subject.settle()


@in_virtual_time
async def test_nodes_that_leave_together_are_emptied_one_after_another() -> None:
    async with cluster(split_spec(1, 1)) as subject:
        fewest = len(subject.workers)

        async def watch() -> None:
            nonlocal fewest
            while True:
                fewest = min(fewest, len(names(subject.dispatcher.view, WorkerState.READY)))
                await subject.dispatcher.view_change()

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(subject.controller.drain_workers([each], 30.0) for each in ("prefill-0", "decode-0")))
        await subject.until(only("prefill-1", "decode-1"))
        watching.cancel()
        assert fewest == 1, "there was always one that serves alone"


@in_virtual_time
async def test_a_leaving_node_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(split_spec(1, 2)) as subject:

        async def never(order: WorkerOrder) -> WorkerHandle:
            raise RuntimeUnavailable(f"no room for {order.config.name}")

        monkeypatch.setattr(subject.runtime, "start_worker", never)
        await subject.controller.drain_workers(["decode-0"], 30.0)
        await subject.controller.drain_workers(["decode-1"], 0.2)
        view = await subject.until(lambda view: names(view, WorkerState.READY) == ["prefill-0"])
        assert [each.name for each in view.workers if each.detail.startswith("no room")]
