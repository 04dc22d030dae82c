"""Pairs that cannot be linked delay no other pair, and links to dead owners are dropped."""

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from cluster.control.membership import Membership
from cluster.control.preflight import RELINK_S, RELINKS_AT_ONCE, Preflight
from cluster.offline.sim.clock import run
from cluster.serving import Serving
from cluster.spec import Role
from diptych.view import WorkerState, WorkerView
from kvtransfer.ticket import LinkReport
from tests.cluster.local import cluster, completed, request, split_spec
from tests.cluster.processes import Processes, in_virtual_time

PROOF_S = 30.0


@dataclass
class Pool:
    name: str


@dataclass
class Info:
    peer: str


@dataclass(eq=False)
class Post:
    """As much of a replica as preflight looks at; `connect` of the cut ones never ends."""

    name: str
    role: Role
    cut: set[str]
    tried: list[tuple[str, str, float]]
    info: Info = field(init=False)
    pool = Pool("pool")
    is_leaving = False
    is_over = False
    passed_preflight = True

    def __post_init__(self) -> None:
        self.info, self.stub = Info(self.name), self
        self.view = WorkerView(self.name, "pool", self.role, WorkerState.READY)

    async def connect(self, peer: str) -> LinkReport:
        loop = asyncio.get_running_loop()
        self.tried.append((peer, self.name, loop.time()))
        if peer in self.cut:
            await loop.create_future()
        return LinkReport(self.name, peer, "tcp", "path", 0.0, 1.0)


def preflight(owners: int, readers: int, cut: set[str]) -> tuple[Preflight, list[Post], list[tuple[str, str, float]]]:
    tried: list[tuple[str, str, float]] = []
    made = Preflight(False, False, PROOF_S, lambda: None)
    owning = [Post(f"prefill-{index}", Role.PREFILL, cut, tried) for index in range(owners)]
    reading = [Post(f"decode-{index}", Role.DECODE, cut, tried) for index in range(readers)]
    for owner in owning:
        for reader in reading:
            made._unlinked[owner, reader] = None  # type: ignore[index]
    return made, owning + reading, tried


async def tended(made: Preflight, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await made.relink_failed_pairs()


def test_a_working_pair_does_not_wait_for_a_failing_one() -> None:
    cut = {f"prefill-{index}" for index in range(7)}
    made, _, _ = preflight(8, 7, cut)
    run(tended(made, RELINK_S + 0.1))
    linked = {("prefill-7", f"decode-{index}") for index in range(7)}
    assert {(link.owner, link.reader) for link in made.links} == linked
    assert not linked & made.unlinked and len(made.unlinked) == 49


def test_every_failed_pair_is_retried_in_time() -> None:
    cut = {f"prefill-{index}" for index in range(8)}
    made, _, tried = preflight(8, 8, cut)
    run(tended(made, 200.0))
    times = [at_s for owner, reader, at_s in tried if (owner, reader) == ("prefill-0", "decode-0")]
    assert times[0] == RELINK_S and len(times) >= 6
    assert all(later - sooner <= PROOF_S + RELINK_S for sooner, later in pairwise(times))


def test_more_failed_pairs_than_the_limit_take_turns() -> None:
    made, _, tried = preflight(10, 10, {f"prefill-{index}" for index in range(10)})
    run(tended(made, 2 * (PROOF_S + RELINK_S)))
    assert len({(owner, reader) for owner, reader, _ in tried}) == 100
    assert sum(at_s == RELINK_S for _, _, at_s in tried) == RELINKS_AT_ONCE


def test_a_preflight_with_an_owner_that_restarted_is_discarded() -> None:
    made, (owner, reader), _ = preflight(1, 1, set())
    proving = reader.connect

    async def restarts_meanwhile(peer: str) -> LinkReport:
        owner.info = Info("another incarnation")
        return await proving(peer)

    reader.connect = restarts_meanwhile
    run(tended(made, RELINK_S + 0.1))
    assert not made.links and made.unlinked == {(owner.name, reader.name)}


async def test_the_link_of_a_dead_owner_is_dropped() -> None:
    async with cluster(split_spec(1, 1)) as subject:
        assert completed(await subject.run(request("r"))).transfers
        owner, reader = subject.workers["prefill-0"], subject.workers["decode-0"]
        forgotten: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        executor: Any = reader._executor
        forget = executor.forget

        async def recorded(incarnation: str) -> None:
            await forget(incarnation)
            forgotten.set_result(incarnation)

        executor.forget = recorded
        reader._peer_links.unlink(owner.incarnation)  # a read found its memory gone
        await owner._leases.close()  # and only then its connection breaks
        assert await asyncio.wait_for(forgotten, 5.0) == owner.incarnation


def test_no_revision_is_used_twice_when_a_controller_is_restarted() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        controller = runtime.services["controller"]
        memory = await controller.call("keep_alive", 0, 0.0)
        for _ in range(50):
            controller.target._bump()  # nobody was told of these when it crashed
        last = controller.target.view().revision
        assert last > memory.revision
        again = controller.build()
        await again.start(replace(memory, workers=()))
        assert again.view().revision > last
        await again.stop()

    in_virtual_time(scene)


def test_links_are_sent_to_a_gateway_when_they_changed_and_not_with_every_revision() -> None:
    async def scene(serving: Serving, runtime: Processes) -> None:
        controller, gateway = runtime.services["controller"], runtime.services["gateway-0"]
        sent: list[int] = []
        members = controller.target.members

        async def recorded(*args: Any) -> Membership:
            membership: Membership = await members(*args)
            sent.append(len(membership.view.links))
            return membership

        controller.target.members = recorded
        for _ in range(5):
            controller.target._bump()
            await asyncio.sleep(0.1)
        assert sent[-4:] == [0] * 4
        assert (await gateway.call("view")).linked("prefill-0", "decode-0")
        runtime.workers["decode-0"]._mark_unhealthy(RuntimeError("the device was lost"))
        await asyncio.sleep(5.0)
        assert 1 in sent[5:], "the links of its next incarnation are new"
        assert (await gateway.call("view")).linked("prefill-0", "decode-0")

    in_virtual_time(scene)
