"""Roles change while requests stream: running requests continue, and new work follows the new role."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.control.changes import ChangeRefused, StaleRevision, UnknownMember
from cluster.events import Accepted, Event
from cluster.spec import ElasticSpec, Role
from diptych.view import WorkerState
from kvtransfer.errors import PeerLost
from tests.cluster.local import Cluster, cluster, completed, generate, mixed_spec, request, split_spec, tokens_of
from workers.request import Request


def role_of(subject: Cluster, worker: str) -> Role:
    return next(each.role for each in subject.dispatcher.view.workers if each.name == worker)


async def flipped(subject: Cluster, worker: str, role: Role) -> None:
    """Flip, and wait until the gateway knows."""
    await subject.controller.flip(worker, role)
    await subject.until(lambda view: any(each.name == worker and each.role is role for each in view.workers))


def accepted(events: list[Event]) -> Accepted:
    return next(event for event in events if isinstance(event, Accepted))


class Streaming:
    """A request under way."""

    def __init__(self, subject: Cluster, asked: Request) -> None:
        self.events: list[Event] = []
        self.begun = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(subject, asked))

    async def _run(self, subject: Cluster, asked: Request) -> None:
        async for event in generate(subject.dispatcher, asked):
            self.events.append(event)
            if tokens_of(self.events):
                self.begun.set()

    async def end(self) -> list[Event]:
        await self._task
        return self.events


async def test_a_flip_keeps_running_requests_and_new_ones_follow_the_new_role() -> None:
    async with cluster(split_spec(2, 2)) as subject:
        asked = [request(f"s{n}", max_tokens=120) for n in range(3)]
        streams = [Streaming(subject, each) for each in asked]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        lines = dict(subject.dispatcher.discovery.clients)
        await flipped(subject, "decode-1", Role.PREFILL)
        for n in range(6):
            where = accepted(await subject.run(request(f"n{n}", first=50 * n + 50)))
            assert where.decode_worker == "decode-0"
        await flipped(subject, "prefill-0", Role.DECODE)
        placed = [accepted(await subject.run(request(f"m{n}", first=50 * n + 7))) for n in range(6)]
        assert {each.prefill_worker for each in placed} <= {"prefill-1", "decode-1"}
        received = [await stream.end() for stream in streams]
        for each, events in zip(asked, received, strict=True):
            assert tokens_of(events) == tokens_of(await subject.run(each))
            assert completed(events).attempts == 1
        assert dict(subject.dispatcher.discovery.clients) == lines, "a flip costs no line"
        await subject.settle()


async def test_a_flip_swaps_both_sides_and_kv_still_moves() -> None:
    async with cluster(split_spec(2, 2)) as subject:
        for worker, role in (("prefill-0", Role.DECODE), ("decode-0", Role.PREFILL), ("prefill-1", Role.MIXED)):
            await flipped(subject, worker, role)
        await flipped(subject, "decode-1", Role.PREFILL)
        await flipped(subject, "prefill-1", Role.DECODE)
        events = await subject.run(request("after"))
        where = accepted(events)
        assert where.prefill_worker.startswith("decode") and where.decode_worker.startswith("prefill")
        assert len(completed(events).transfers) == 1
        assert subject.dispatcher.slo_attainment().role_changes == (
            *(("decode", "prefill", 2), ("mixed", "decode", 1), ("prefill", "decode", 1), ("prefill", "mixed", 1)),
        )
        await subject.settle()


async def test_a_restarted_worker_keeps_its_role() -> None:
    async with cluster(split_spec(2, 2)) as subject:
        await flipped(subject, "decode-1", Role.PREFILL)
        before = next(each for each in subject.dispatcher.view.workers if each.name == "decode-1")
        subject.workers["decode-1"]._mark_unhealthy(RuntimeError("a test"))
        await subject.until(
            lambda view: any(
                each.name == "decode-1" and each.incarnation != before.incarnation and each.state is WorkerState.READY
                for each in view.workers
            )
        )
        assert role_of(subject, "decode-1") is Role.PREFILL


async def test_a_pair_that_cannot_be_linked_refuses_the_flip(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(split_spec(2, 2)) as subject:
        revision = subject.dispatcher.view.revision

        async def broken(peer: Any) -> None:
            raise PeerLost(f"no way to {peer.worker}")

        monkeypatch.setattr(subject.workers["decode-0"], "connect", broken)
        with pytest.raises(ChangeRefused, match=r"decode-1 stays a decode worker.*no way to decode-1"):
            await subject.controller.flip("decode-1", Role.PREFILL)
        assert role_of(subject, "decode-1") is Role.DECODE
        assert subject.controller.view().revision == revision
        monkeypatch.undo()
        await flipped(subject, "decode-1", Role.PREFILL)


async def test_impossible_flips_are_refused_with_the_reason() -> None:
    async with cluster(split_spec(1, 2)) as subject:
        control, revision = subject.controller, subject.controller.view().revision
        with pytest.raises(UnknownMember, match=r"no worker 'decode-7'; there are prefill-0, decode-0, decode-1"):
            await control.flip("decode-7", Role.PREFILL)
        with pytest.raises(StaleRevision, match=rf"revision {revision + 3} was expected.*at {revision};"):
            await control.flip("decode-1", Role.PREFILL, revision + 3)
        with pytest.raises(ChangeRefused, match=r"elastic\.floors\.prefill is 1"):
            await control.flip("prefill-0", Role.DECODE)
        assert await control.flip("decode-1", Role.DECODE, revision) == revision, "nothing to do is no change"
        assert await control.flip("decode-1", Role.MIXED, revision) > revision
        assert await control.flip("prefill-0", Role.DECODE) > revision, "a mixed worker prefills too"
        with pytest.raises(ChangeRefused, match=r"0 ready workers would prefill"):
            await control.flip("decode-1", Role.DECODE)


async def test_operators_may_flip_below_no_floor() -> None:
    spec = replace(mixed_spec(2), elastic=ElasticSpec(floors={"prefill": 2, "decode": 0}))
    async with cluster(spec) as subject:
        with pytest.raises(ChangeRefused, match=r"elastic\.floors\.prefill is 2"):
            await subject.controller.flip("mixed-0", Role.DECODE)
        await subject.controller.flip("mixed-0", Role.PREFILL)
        await flipped(subject, "mixed-1", Role.PREFILL)
        assert completed(await subject.run(request("one does both"))).completion_tokens == 8
