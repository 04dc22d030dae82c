"""KV cache events of workers reach a gateway's prefix index: by number, past gaps, failures and restarts."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.dispatch.kv_event_reader import KVEventReader
from cluster.events import Accepted
from cluster.offline.sim.clock import run as run_virtually
from cluster.policy.routing.prefix_index import Match, PrefixIndex, prefix_hashes
from cluster.runtime.interface import WorkerStub
from cluster.runtime.runtime_errors import WorkerGone
from cluster.spec import Role
from tests.cluster.local import Cluster, cluster, completed, request, split_spec
from workers.engine.kv_event_log import KVEventLog, Tier
from workers.errors import WorkerClosed
from workers.kv_events import KVEvents

PAUSE_S = 0.25
CALL_S = 0.01


class Source:
    """A worker that has a cache and nothing else; calls to it take time and may be made to go wrong."""

    def __init__(self) -> None:
        self.log = KVEventLog(1, max_removed=4)
        self.calls: list[float] = []
        self.under_way = 0
        self.trouble: list[str] = []  # of the next calls
        self.answers: list[KVEvents] = []  # so far
        self.closed = False

    async def cache_since(self, last: int, reach: int) -> KVEvents:
        assert not self.under_way, "two calls at once"
        self.calls.append(asyncio.get_running_loop().time())
        self.under_way += 1
        try:
            await asyncio.sleep(CALL_S)
            news = self.log.since(last, reach, most=3)
            await asyncio.sleep(CALL_S)
        finally:
            self.under_way -= 1
        trouble = self.trouble.pop() if self.trouble else ""
        if self.closed:
            raise WorkerClosed("gone")
        self.answers.append(news)
        if trouble == "lost":
            raise WorkerGone("the answer was lost")
        if trouble == "repeated" or trouble == "late":  # the last answer again, or the one before
            return self.answers[-2 if trouble == "repeated" else -3 :][0]
        return KVEvents(last + 1, news.last, news.reach, news.block_size) if trouble == "gap" else news


class Gateway:
    """One worker after another of one name, and the index that hears of them."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.life = 0
        self.reader: KVEventReader | None = None
        self.meet()

    def restart(self) -> None:
        """The gateway: it knows nothing."""
        self.index = PrefixIndex()
        self.dial()

    def meet(self) -> None:
        """The worker, restarted; or, of a line that was lost, the same one again."""
        self.life += 1
        self.source = Source()
        self.dial()

    def dial(self) -> None:
        if self.reader is not None:
            self.reader.stop()
        handle = cast(WorkerStub, self.source)
        self.reader = KVEventReader(handle, partial(self.index.take, "w", str(self.life)), PAUSE_S)

    def hear(self) -> None:
        assert self.reader is not None
        self.reader.on_stats(self.source.log.number)

    def known(self) -> dict[int, Match]:
        """What a lookup finds of each single name."""
        return {name: found["w"] for name in range(9) if (found := self.index.matches([name]))}


steps = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(list(Tier)), st.lists(st.integers(0, 8), max_size=6)),
    st.tuples(st.just("remove"), st.sampled_from(list(Tier)), st.lists(st.integers(0, 8), max_size=6)),
    st.tuples(st.just("trouble"), st.sampled_from(["lost", "gap", "repeated", "late"])),
    st.tuples(st.sampled_from(["hear", "hear", "restart", "redial", "new gateway"])),
    st.tuples(st.just("wait"), st.sampled_from([0.005, 0.015, 0.1, 0.4])),
)


async def follow(received: list[tuple]) -> None:
    subject = Gateway()
    for what, *how in received:
        if what == "add" or what == "remove":
            for name in how[1]:
                getattr(subject.source.log, what)(how[0], name)
        elif what == "trouble":
            subject.source.trouble.append(how[0])
        elif what == "hear":
            subject.hear()
        elif what == "wait":
            await asyncio.sleep(how[0])
        elif what == "redial":
            subject.dial()
        elif what == "new gateway":
            subject.restart()
        else:
            subject.source.closed = True
            subject.meet()
    log = subject.source.log
    log.add(Tier.DEVICE, 0)
    for _ in range(4):  # statistics come again and again; each of them may meet one trouble
        subject.hear()
        await asyncio.sleep(30.0)
    device, host, disk, remote = (log.hashes(tier) for tier in Tier)
    behind = host - device, disk - device - host, remote - device - host - disk
    assert subject.known() == {
        name: Match(128, *(128 * (name in tier) for tier in behind)) for name in device | host | disk | remote
    }
    assert subject.reader is not None
    await subject.reader.close()


@settings(max_examples=120, deadline=None)
@given(st.lists(steps, max_size=40))
def test_the_index_is_correct_after_any_lost_events(received: list[tuple]) -> None:
    troubles = 0
    kept = []
    for each in received:  # no more of them than the end has rounds for
        troubles = 0 if each[0] == "restart" else troubles + (each[0] == "trouble")
        if troubles <= 3 or each[0] != "trouble":
            kept.append(each)
    run_virtually(follow(kept))


def virtually(story: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: run_virtually(story())


@virtually
async def test_cache_events_are_read_when_new_and_not_too_often() -> None:
    subject = Gateway()
    for name in range(100):
        subject.source.log.add(Tier.DEVICE, name % 9)
        subject.hear()
        await asyncio.sleep(0.02)
    await asyncio.sleep(5.0)
    asked = len(subject.source.calls)
    subject.hear()
    await asyncio.sleep(5.0)
    assert len(subject.source.calls) == asked, "nothing is new"
    rounds = [
        each
        for each, before in zip(subject.source.calls[1:], subject.source.calls, strict=False)
        if each - before > 0.1
    ]
    assert all(b - a >= PAUSE_S - 1e-9 for a, b in pairwise(rounds))
    assert 6 <= len(rounds) <= 9, "two seconds of changes, four times a second"


async def index_of(subject: Cluster, expected: dict[str, int], wanted: tuple[int, ...]) -> None:
    """Wait until the gateway's index knows this of the prompt. News come by themselves."""
    policy = subject.dispatcher._policy
    async with asyncio.timeout(30.0):
        while True:
            found = policy.index.matches(prefix_hashes(wanted), float("inf"))
            if {name: match.tokens for name, match in found.items()} == expected:
                return
            await asyncio.sleep(0.01)


async def test_a_gateway_learns_cached_and_evicted_blocks() -> None:
    spec = split_spec(2, 1)
    spec = replace(spec, gateway=replace(spec.gateway, routing="mooncake-local", cache_events_interval_s=0.02))
    async with cluster(spec) as subject:
        wanted = request("first", 300, max_tokens=2)
        events = await subject.run(wanted)
        assert isinstance(events[0], Accepted)
        where = events[0].prefill_worker
        await index_of(subject, {where: 256, "decode-0": 256}, wanted.prompt)
        again = completed(await subject.run(request("again", 300, max_tokens=2)))
        assert again.cached_tokens == 288, "whole blocks, up to the last token"
        subject.workers[where].engine.pool.clear_cache()
        await index_of(subject, {"decode-0": 256}, wanted.prompt)


async def test_the_cache_of_a_restarted_worker_is_read_from_the_start() -> None:
    spec = split_spec(1, 1)
    spec = replace(spec, gateway=replace(spec.gateway, routing="mooncake-local", cache_events_interval_s=0.02))
    async with cluster(spec) as subject:
        wanted = request("first", 300, max_tokens=2)
        await subject.run(wanted)
        await index_of(subject, {"prefill-0": 256, "decode-0": 256}, wanted.prompt)
        await subject.workers["prefill-0"].close()
        await index_of(subject, {"decode-0": 256}, wanted.prompt)
        while len(subject.dispatcher.discovery.routing_view().ready(Role.PREFILL, Role.DECODE)) < 2:
            await subject.dispatcher.discovery.change()
        await subject.run(request("again", 300, max_tokens=2))
        await index_of(subject, {"prefill-0": 256, "decode-0": 256}, wanted.prompt)


async def test_routers_without_an_index_read_no_cache_events() -> None:
    async with cluster(split_spec(1, 1)) as subject:
        wanted = request("first", 300, max_tokens=2)
        await subject.run(wanted)
        await asyncio.sleep(0.1)
        assert subject.dispatcher._policy.index.matches(prefix_hashes(wanted.prompt)) == {}
