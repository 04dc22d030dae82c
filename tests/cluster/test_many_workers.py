"""A large cluster tests a sample of its pairs, connects the others when they are used, and avoids those that fail."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

import cluster.control.preflight as preflight
from cluster.control.changes import ChangeRefused
from cluster.control.membership import Membership
from cluster.control.preflight import MAX_LINKS, SAMPLE, SMALL
from cluster.policy.estimate.links import MeasuredLinks
from cluster.serving import Serving
from cluster.spec import ClusterSpec, Role
from diptych.view import ClusterView, WorkerState, WorkerView
from kvtransfer.errors import PeerLost
from kvtransfer.ticket import LinkReport, PeerAddress
from tests.cluster.local import Cluster, cluster, completed, request, split_spec
from tests.cluster.processes import Processes, in_virtual_time
from workers.worker import Worker

MANY = 20  # of each pool


def patient_spec(each: int) -> ClusterSpec:
    """As many prefill as decode workers, which a slow machine does not lose."""
    spec = split_spec(each, each)
    health = replace(spec.health, heartbeat_s=0.25, dead_after_s=30.0)
    return replace(spec, health=health, transfer=replace(spec.transfer, lease_s=60.0))


def linked(view: ClusterView) -> set[tuple[str, str]]:
    return {(link.owner, link.reader) for link in view.links}


async def counted_pairs(monkeypatch: pytest.MonkeyPatch, each: int, subject_of: Any = None) -> Counter[tuple[str, str]]:
    """The pairs that a cluster of so many prefill and as many decode workers tests at its start, and how often."""
    tested: Counter[tuple[str, str]] = Counter()
    connect = Worker.connect

    async def counted(self: Worker, peer: PeerAddress) -> LinkReport:
        tested[peer.worker, self.config.name] += 1
        return await connect(self, peer)

    monkeypatch.setattr(Worker, "connect", counted)
    async with cluster(patient_spec(each)) as subject:
        at_start = tested.copy()
        if subject_of is not None:
            await subject_of(subject)
    return at_start


async def test_a_small_cluster_tests_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    async def shown(subject: Cluster) -> None:
        assert linked(subject.dispatcher.view) == every

    every = {(f"prefill-{owner}", f"decode-{reader}") for owner in range(4) for reader in range(4)}
    assert await counted_pairs(monkeypatch, 4, shown) == Counter(every)


@pytest.mark.full
async def test_a_large_cluster_tests_a_sample_and_uses_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    async def used(subject: Cluster) -> None:
        view = subject.dispatcher.view
        assert not view.unlinked and len(view.links) <= MAX_LINKS
        answers = await asyncio.gather(*(subject.run(request(f"r{n}", 40, first=50 * n)) for n in range(60)))
        transfers = [report for events in answers for report in completed(events).transfers]
        assert len(transfers) == 60 and all(completed(events).attempts == 1 for events in answers)
        await subject.settle()

    tested = await counted_pairs(monkeypatch, MANY, used)
    each = Counter(name for pair in tested for name in pair)
    assert len(tested) < MANY * MANY and sum(tested.values()) <= 2 * MANY * max(SMALL, SAMPLE)
    assert len(each) == 2 * MANY and min(each.values()) >= SAMPLE, "each one was tested with some of the other pool"


async def test_a_pair_that_cannot_connect_is_avoided_until_it_passes_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "RELINK_S", 0.2)
    async with cluster(split_spec(1, 2)) as subject:
        reader = subject.workers["decode-0"]
        executor: Any = reader._executor
        connect = executor.connect

        async def cut(peer: PeerAddress, *, measures: bool = True) -> LinkReport:
            raise PeerLost(f"no way to {peer.worker}")

        executor.connect = cut
        reader._peer_links._links.clear()
        asked = [request(f"r{n}", 40, first=50 * n) for n in range(4)]
        ends = [completed(events) for events in await asyncio.gather(*map(subject.run, asked))]
        assert any(end.attempts > 1 for end in ends), "someone had to find out"
        view = await subject.until(lambda view: bool(view.unlinked))
        assert view.unlinked == {("prefill-0", "decode-0")} and not view.linked("prefill-0", "decode-0")
        assert linked(view) == {("prefill-0", "decode-1")}
        for n in range(4):
            end = completed(await subject.run(request(f"s{n}", 40, first=60 * n + 7)))
            assert end.attempts == 1 and len(end.transfers) == 1
        executor.connect = connect
        view = await subject.until(lambda view: not view.unlinked)
        assert ("prefill-0", "decode-0") in linked(view)
        await subject.settle()


async def test_a_flip_in_a_large_cluster_is_refused_if_its_sample_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(patient_spec(MANY)) as subject:
        tried: list[str] = []

        async def broken(self: Worker, peer: PeerAddress) -> LinkReport:
            tried.append(peer.worker)
            raise PeerLost(f"no way to {peer.worker}")

        monkeypatch.setattr(Worker, "connect", broken)
        with pytest.raises(ChangeRefused, match=r"decode-1 stays a decode worker: no KV can move.*no way to decode-1"):
            await subject.controller.flip("decode-1", Role.PREFILL)
        assert 0 < len(tried) <= SAMPLE
        monkeypatch.undo()
        await subject.controller.flip("decode-1", Role.PREFILL)
        assert not subject.controller.view().unlinked


def test_a_gateway_gets_only_the_members_that_changed() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        controller, gateway = runtime.services["controller"], runtime.services["gateway-0"]
        sent: list[Membership] = []
        members = controller.target.members

        async def recorded(*args: Any) -> Membership:
            sent.append(await members(*args))
            return sent[-1]

        controller.target.members = recorded
        controller.target._bump()
        await asyncio.sleep(0.1)
        await controller.call("flip", "decode-0", Role.MIXED)
        await asyncio.sleep(0.1)
        assert [each.name for each in sent[-1].view.workers] == ["decode-0"] and sent[-1].names is None
        await controller.call("scale", "prefill", 2)
        await asyncio.sleep(1.0)
        assert any(each.names == ("prefill-0", "prefill-1", "decode-0") for each in sent)
        view: ClusterView = await gateway.call("view")
        assert [(each.name, each.role) for each in view.workers] == [
            ("prefill-0", Role.PREFILL), ("prefill-1", Role.PREFILL), ("decode-0", Role.MIXED),
        ]  # fmt: skip
        assert view.revision == controller.target.view().revision
        assert all(each.state is WorkerState.READY for each in view.workers)

    in_virtual_time(scene)


def test_a_gateway_gets_the_whole_membership_of_another_controller() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        controller = runtime.services["controller"]
        memory = await controller.call("keep_alive", 0, 0.0)
        known = await controller.call("members", 0, 0.0)
        other = controller.build()
        await other.start(memory)
        whole = await other.members(known.revision, 1.0, "gateway-0", known.links_id)
        assert whole.since == 0 and [each.name for each in whole.view.workers] == ["prefill-0", "decode-0"]
        assert whole.after(known) == whole and whole.links_id != known.links_id
        await other.stop()

    in_virtual_time(scene)


def test_a_membership_follows_from_the_one_before() -> None:
    def worker(name: str, role: Role) -> WorkerView:
        return WorkerView(name, "pool", role, WorkerState.READY)

    def membership(revision: int, *workers: WorkerView, linked: bool = False, **more: Any) -> Membership:
        links, unlinked = ((link,), frozenset({("b", "a")})) if linked else ((), frozenset())
        view = ClusterView(revision, "c", None, workers, links=links, unlinked=unlinked)
        return Membership(view, {each.name: None for each in workers}, **more)

    link = LinkReport("b", "a", "tcp", "path", 0.0, 1.0)
    a, b, c = (worker(name, Role.DECODE) for name in "abc")
    before = membership(5, a, b, linked=True, links_id="id.1")
    turned = worker("b", Role.PREFILL)
    after = membership(6, turned, links_id="id.1", since=5).after(before)
    assert after == membership(6, a, turned, linked=True, links_id="id.1")
    assert after.view.workers[0] is a and after.view.links is before.view.links
    other = membership(7, c, links_id="id.2", since=5, names=("c", "b")).after(before)
    assert other.view.workers == (c, b) and other.handles == {"c": None, "b": None} and other.view.links == ()


async def test_a_picture_changes_only_where_something_changed() -> None:
    async with cluster(split_spec(2, 2)) as subject:
        discovery = subject.dispatcher.discovery
        before = discovery.routing_view()
        assert discovery.routing_view() is before
        client = discovery.clients["decode-1"]
        client.stats = structs.replace(client.stats, queued_tokens=77)
        client.touched()
        after = discovery.routing_view()
        assert [one is other for one, other in zip(before.workers, after.workers, strict=True)] == [1, 1, 1, 0]
        assert after.workers[3].stats.queued_tokens == 77
        client.give_up("for the test")
        assert discovery.routing_view().workers[3].state is WorkerState.DEAD


def test_a_link_that_is_not_measured_is_estimated_by_those_of_its_pools() -> None:
    workers = tuple(WorkerView(name, name[0], Role.MIXED, WorkerState.READY) for name in ("p0", "p1", "d0", "d1", "d2"))
    speeds = {("p0", "d0"): 1e9, ("p0", "d1"): 3e9, ("p1", "d1"): 2e9, ("p1", "d2"): 0.0}
    links = tuple(LinkReport(reader, owner, "tcp", "", 0.0, speed) for (owner, reader), speed in speeds.items())
    known, view = MeasuredLinks(), ClusterView(1, "c", None, workers, links)
    found = {pair: known.between(view, *pair) for pair in (("p0", "d0"), ("p1", "d2"), ("p1", "d0"), ("d0", "p0"))}
    assert {pair: None if link is None else link.bytes_per_s for pair, link in found.items()} == {
        ("p0", "d0"): 1e9, ("p1", "d2"): 2e9, ("p1", "d0"): 2e9, ("d0", "p0"): None,
    }  # fmt: skip


def test_answers_to_a_gateway_are_spaced_only_after_many() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        controller = runtime.services["controller"].target
        clock = asyncio.get_running_loop().time
        answered: list[float] = []
        begun_s = clock()
        for _ in range(40):
            controller._bump()
            await controller.members(0, 1.0, "another")
            answered.append(clock() - begun_s)
        assert answered[15] < 0.01, "a few are not delayed"
        assert 3.7 <= answered[39] - answered[20] <= 3.9, "then there are 5 a second"

    in_virtual_time(scene)


@pytest.mark.full
async def test_a_new_worker_whose_sample_fails_gets_no_kv_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(patient_spec(MANY)) as subject:
        connect = Worker.connect

        async def cut_off(self: Worker, peer: PeerAddress) -> LinkReport:
            if self.config.name == f"decode-{MANY}":
                raise PeerLost(f"no way to {peer.worker}")
            return await connect(self, peer)

        monkeypatch.setattr(Worker, "connect", cut_off)
        await subject.controller.scale("decode", MANY + 1)
        view = await subject.until(lambda view: len(view.ready(Role.DECODE)) == MANY + 1)
        assert view.unlinked == {(f"prefill-{owner}", f"decode-{MANY}") for owner in range(MANY)}
        assert completed(await subject.run(request("r", 40))).attempts == 1
        monkeypatch.undo()
        monkeypatch.setattr(preflight, "RELINK_S", 0.2)
        await subject.until(lambda view: not view.unlinked)
