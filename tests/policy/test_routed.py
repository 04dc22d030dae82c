"""Every policy through a whole cluster: the same tokens, nothing left behind on workers or in the books."""

import asyncio
from dataclasses import replace

import pytest

from cluster.dispatcher import Dispatcher
from cluster.events import Accepted, Delta, Event, Rejected
from cluster.spec import ROUTING, ClusterSpec, Role
from tests.cluster.local import cluster, completed, request, split_spec, tokens_of
from workers.costs import LinearCost
from workers.executor.modelled import modelled_token
from workers.request import SLO, Request

SLOW = LinearCost(0.01, 0.001, 0.0, 0.005, 0.0, 0.0, 0.0)


def routed(spec: ClusterSpec, routing: str, admission: str = "none", slo: SLO | None = None) -> ClusterSpec:
    gateway = replace(spec.gateway, routing=routing, admission=admission, slo=slo or SLO())
    return replace(spec, gateway=gateway)


def books_are_empty(dispatcher: Dispatcher) -> bool:
    dispatcher._policy.book.check()
    return len(dispatcher._policy.book) == 0


def expected(wanted: Request) -> list[int]:
    length, count = len(wanted.prompt), wanted.sampling.max_tokens
    return [modelled_token(wanted.key, length + n, 1000, (0,)) for n in range(count or 0)]


@pytest.mark.parametrize("routing", ROUTING)
async def test_every_router_serves_the_same_tokens_and_leaves_nothing(routing: str) -> None:
    spec = routed(split_spec(2, 2), routing)
    mixed = replace(spec.pools[0], name="mixed", role=Role.MIXED, replicas=1)
    async with cluster(replace(spec, pools=(*spec.pools, mixed))) as subject:
        # Three prompts that share 192 tokens, and others; one wants a single token.
        asked = [request(f"r{n}", 30 + 27 * n, max_tokens=1 + n % 7, first=1 + 300 * (n % 3 > 0)) for n in range(18)]
        runs = await asyncio.gather(*(subject.run(each) for each in asked))
        for wanted, events in zip(asked, runs, strict=True):
            assert tokens_of(events) == expected(wanted)
            completed(events).ledger.check()
        await subject.settle()
        assert books_are_empty(subject.dispatcher)
        view = subject.dispatcher.view
        expects_all = routing in ("splitwise", "tetri", "mooncake")
        assert view.linked("decode-0", "prefill-0") == view.linked("prefill-0", "prefill-1") == expects_all


@pytest.mark.parametrize("routing", ["splitwise", "tetri", "mooncake-local"])
async def test_books_are_empty_after_cancelled_and_refused_requests(routing: str) -> None:
    spec = split_spec(1, 1, kv_blocks=40)
    spec = replace(routed(spec, routing), gateway=replace(spec.gateway, routing=routing, placement_timeout_s=0.2))
    async with cluster(spec, SLOW) as subject:
        tasks = [asyncio.ensure_future(subject.run(request(f"r{n}", 200, max_tokens=60))) for n in range(6)]
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), Rejected) for task in done if task.exception())
        await subject.settle()
        assert books_are_empty(subject.dispatcher)


async def test_a_gateway_turns_away_what_it_could_not_serve_in_time() -> None:
    spec = routed(split_spec(), "least-loaded", "early", SLO(ttft_s=0.5))
    spec = replace(spec, pools=tuple(replace(pool, cost=SLOW) for pool in spec.pools))
    async with cluster(spec) as subject:
        events = await subject.run(request("short", 100))
        assert isinstance(events[0], Accepted) and events[0].predicted_ttft_s == pytest.approx(0.12)
        with pytest.raises(Rejected, match=r"the first token would take 1.15 s, 0.5 s are promised") as refused:
            await subject.run(request("long", 990))
        assert refused.value.retry_after_s == pytest.approx(0.65)
        await subject.settle()
        assert books_are_empty(subject.dispatcher)


async def test_late_admission_turns_away_behind_the_first_token_and_frees_both_sides() -> None:
    spec = routed(split_spec(), "least-loaded", "late", SLO(tpot_s=0.001))
    async with cluster(replace(spec, pools=tuple(replace(pool, cost=SLOW) for pool in spec.pools))) as subject:
        seen: list[Event] = []
        with pytest.raises(Rejected, match="each token would take"):
            async for event in subject.dispatcher.generate(request("a", 100)):
                seen.append(event)
        assert [type(event) for event in seen] == [Accepted, Delta]
        assert tokens_of(await subject.run(request("b", 100, max_tokens=1))) != []
        await subject.settle()
        assert books_are_empty(subject.dispatcher)
