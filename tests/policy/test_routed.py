"""Every policy through a whole cluster: the same tokens, and nothing is left on workers or in records."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import Accepted, Rejected
from cluster.policy.routing.prefix_index import Match, prefix_hashes
from cluster.spec import ROUTING, ClusterSpec, Role
from kvtransfer.ticket import TransferTicket
from tests.cluster.local import Cluster, cluster, completed, in_virtual_time, request, split_spec, tokens_of
from workers.costs import LinearCost
from workers.engine.blocks import OutOfBlocks
from workers.engine.prefix_fetch import PrefixFetch
from workers.engine.step import StepPlan, StepResult
from workers.errors import WorkerError
from workers.executor.simulated import simulated_token
from workers.request import SLO, Request
from workers.worker import Worker

SLOW = LinearCost(0.01, 0.001, 0.0, 0.005, 0.0, 0.0, 0.0)


def routed(spec: ClusterSpec, routing: str, admission: str = "none", slo: SLO | None = None) -> ClusterSpec:
    gateway = replace(spec.gateway, routing=routing, admission=admission, slo=slo or SLO())
    return replace(spec, gateway=gateway)


def books_are_empty(dispatcher: Dispatcher) -> bool:
    dispatcher._policy.active.check()
    return len(dispatcher._policy.active) == 0


def expected(wanted: Request) -> list[int]:
    length, count = len(wanted.prompt), wanted.sampling.max_tokens
    return [simulated_token(wanted.key, length + n, 1000, (0,)) for n in range(count or 0)]


@pytest.mark.grid(keep=3)
@pytest.mark.parametrize("routing", ROUTING)
@in_virtual_time
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
        expects_all = routing in ("splitwise", "mooncake", "slo")
        tested = {(link.owner, link.reader) for link in view.links}
        assert (("decode-0", "prefill-0") in tested) == (("prefill-0", "prefill-1") in tested) == expects_all


@pytest.mark.parametrize("routing", ["splitwise", "mooncake-local"])
@in_virtual_time
async def test_records_are_empty_after_cancelled_and_refused_requests(routing: str) -> None:
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


BELIEVED = replace(SLOW, step_s=1.0, prefill_token_s=0.1)


@asynccontextmanager
async def occupied(owner: str) -> AsyncIterator[Cluster]:
    """Only the owner has a prompt of 400 tokens. prefill-0, which computed it, does not get on with another one.

    It goes on when we leave; then everything must end with nothing held.
    """
    spec = routed(split_spec(2, 1, kv_blocks=400), "mooncake")
    async with cluster(replace(spec, pools=tuple(replace(pool, cost=BELIEVED) for pool in spec.pools))) as subject:
        first = request("first", 400, max_tokens=2)
        await subject.run(first)
        for name in {"prefill-0", "decode-0"} - {owner}:
            subject.workers[name].engine.pool.clear_cache()
        async with asyncio.timeout(10.0):
            while set(cached(subject, first)) != {owner}:
                await asyncio.sleep(0.01)
        accepted, starts_decoding = asyncio.Event(), asyncio.Event()
        executor = subject.workers["prefill-0"]._executor
        execute = executor.execute

        async def held_up(plan: StepPlan) -> StepResult:
            await starts_decoding.wait()
            return await execute(plan)

        executor.execute = held_up
        other = request("busy", 399, first=500, max_tokens=2)
        busy = asyncio.ensure_future(subject.dispatcher.run(other, lambda event: accepted.set()))
        await accepted.wait()
        try:
            yield subject
        finally:
            starts_decoding.set()
        await busy
        await subject.settle()
        assert books_are_empty(subject.dispatcher)


async def fetched(subject: Cluster) -> int:
    """How many tokens of its prompt a request found on prefill-1, whose beginning prefill-0 has."""
    events = await subject.run(request("second", 500))
    accepted = events[0]
    assert isinstance(accepted, Accepted) and accepted.prefill_worker == "prefill-1"
    assert tokens_of(events) == expected(request("second", 500))
    return completed(events).cached_tokens


def cached(subject: Cluster, wanted: Request) -> dict[str, Match]:
    """What the gateway knows of the workers' caches."""
    now_s = asyncio.get_running_loop().time()
    return subject.dispatcher._policy.index.matches(prefix_hashes(wanted.prompt), now_s)


OWNERS = pytest.mark.parametrize("owner", ["prefill-0", "decode-0"])


@OWNERS
@in_virtual_time
async def test_a_prefix_is_fetched_where_that_is_sooner_and_stays_there(owner: str) -> None:
    async with occupied(owner) as subject:
        assert await fetched(subject) == 400
        assert await fetched(subject) == 496, "all but the last, partial block"


Break = Callable[[Worker, Worker], None]


def forget_the_cache(owner: Worker, reader: Worker) -> None:
    owner.engine.pool.clear_cache()


def refuse_to_hold(owner: Worker, reader: Worker) -> None:
    async def hold_prefix(request: Request) -> TransferTicket | None:
        raise WorkerError("no prefix today")

    owner.hold_prefix = hold_prefix


def leave_no_room(owner: Worker, reader: Worker) -> None:
    def begin(tokens: Sequence[int], salt: str = "", now_s: float = 0.0, **link: object) -> PrefixFetch:
        raise OutOfBlocks("none left")

    reader.engine.prefix_fetches.begin = begin


def damage(owner: Worker, reader: Worker) -> None:
    """The owner's digests are not those of its bytes."""
    heads, layers, *_ = owner._executor.facts.layout.shape
    pool = owner.engine.pool
    pool.digests.update(dict.fromkeys(pool._blocks.values(), (bytes(8 * heads * layers),)))


def expire(owner: Worker, reader: Worker) -> None:
    """The lease ends before its reader comes."""
    hold = owner.hold_prefix

    async def late(request: Request) -> TransferTicket | None:
        ticket = await hold(request)
        owner.engine.expire(math.inf)
        return ticket

    owner.hold_prefix = late


@pytest.mark.grid(keep=4)
@pytest.mark.parametrize("break_it", [forget_the_cache, leave_no_room, damage, refuse_to_hold, expire])
@OWNERS
@in_virtual_time
async def test_a_prefix_that_is_gone_or_refused_is_computed_again(owner: str, break_it: Break) -> None:
    async with occupied(owner) as subject:
        break_it(subject.workers[owner], subject.workers["prefill-1"])
        assert await fetched(subject) == 0


@OWNERS
@in_virtual_time
async def test_a_cancelled_prefix_fetch_leaves_nothing(owner: str) -> None:
    async with occupied(owner) as subject:
        asked = asyncio.Event()

        async def never(request: Request) -> TransferTicket | None:
            asked.set()
            await asyncio.Event().wait()
            return None

        subject.workers[owner].hold_prefix = never
        second = asyncio.ensure_future(subject.run(request("second", 500)))
        await asked.wait()
        second.cancel()
        await asyncio.wait({second})


@in_virtual_time
async def test_a_gateway_refuses_what_it_could_not_serve_in_time() -> None:
    spec = routed(split_spec(), "least-loaded", "predictive", SLO(ttft_s=0.5))
    spec = replace(spec, pools=tuple(replace(pool, cost=SLOW) for pool in spec.pools))
    async with cluster(spec) as subject:
        with pytest.raises(Rejected, match=r"the first token would take 1.15 s, the SLO is 0.5 s") as refused:
            await subject.run(request("long", 990))
        assert refused.value.retry_after_s == pytest.approx(0.65)
        first_event = (await subject.run(request("short", 100)))[0]
        assert isinstance(first_event, Accepted) and first_event.predicted_ttft_s is not None
        assert first_event.predicted_ttft_s >= 0.12, "what the prompt takes, and how long the request was here before"
        await subject.settle()
        assert books_are_empty(subject.dispatcher)
