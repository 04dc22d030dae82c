"""Prompts that have not begun are placed on other workers: token-exact, sooner, no failure, no leak."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.dispatch.request_runner import MAX_REPLACEMENTS
from cluster.events import Accepted, Completed, Delta, Event
from cluster.offline.sim import clock
from cluster.policy.routing.router import Placement
from cluster.spec import PoolSpec, Role
from tests.cluster.local import Cluster, cluster, generate, request, split_spec, tokens_of
from workers.costs import LinearCost
from workers.executor.simulated import simulated_token
from workers.request import SLO, Request

COST = LinearCost(0.001, 0.001, 0.0, 0.005, 0.0, 0.0, 0.0)  # a millisecond for each prompt token
TEST_SLO = SLO(ttft_s=0.4, tpot_s=0.2)


@asynccontextmanager
async def opened(*, rebalance: bool = True, mixed: bool = False) -> AsyncIterator[Cluster]:
    """Two for prompts and one for answers, or two for both; the first of them gets all until `honest`."""
    spec = split_spec(2, 1, backends=("simulated",), kv_blocks=600, max_running=32)
    pools = tuple(replace(pool, cost=COST) for pool in spec.pools)
    if mixed:
        pools = (PoolSpec("prefill", Role.MIXED, 2, engine=pools[0].engine, cost=COST),)
    gateway = replace(spec.gateway, routing="slo", rebalance=rebalance)
    async with cluster(replace(spec, gateway=gateway, pools=pools), COST) as subject:
        policy = subject.dispatcher._policy
        honest = policy.choose
        decode = "prefill-0" if mixed else "decode-0"
        policy.choose = lambda query: (
            honest(query) if query.request.attempt else Placement("prefill-0", decode, "crowded")
        )
        yield subject
        policy.active.check()
        assert not len(policy.active) and not policy.index._expected.keys() - {key for _, key in policy.index._settled}
        await subject.settle()


def asked(count: int) -> list[Request]:
    return [replace(request(f"r{n}", 100, max_tokens=5, first=100 * n), slo=TEST_SLO) for n in range(count)]


def exact(name: str) -> list[int]:
    return [simulated_token(f"{name}/0", 100 + n, 1000, (0,)) for n in range(5)]


def in_virtual_time(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scene()

    clock.run(whole())


async def timed(subject: Cluster, wanted: Request) -> tuple[float, list[Event]]:
    """With when its first token came."""
    loop = asyncio.get_running_loop()
    begin_s, first_s, events = loop.time(), 0.0, []
    async for event in generate(subject.dispatcher, wanted):
        first_s = first_s or (loop.time() - begin_s) * isinstance(event, Delta)
        events.append(event)
    return first_s, events


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_behind_a_long_queue_move_to_an_idle_worker(mixed: bool) -> None:
    async def scene() -> None:
        worst_s = {}
        for rebalance in (False, True):
            async with opened(rebalance=rebalance, mixed=mixed) as subject:
                wanted = asked(24)
                runs = await asyncio.gather(*(timed(subject, each) for each in wanted))
                worst_s[rebalance] = max(first_s for first_s, _ in runs)
                went = 0
                for each, (_, events) in zip(wanted, runs, strict=True):
                    end, accepted = events[-1], [event for event in events if isinstance(event, Accepted)]
                    assert isinstance(end, Completed) and tokens_of(events) == exact(each.id)
                    assert end.attempts == 1, "nothing failed"
                    end.ledger.check()
                    assert [event.attempt for event in accepted] == list(range(len(accepted)))
                    assert len(accepted) <= 1 + MAX_REPLACEMENTS
                    went += accepted[-1].prefill_worker != "prefill-0"
                assert went >= 6 if rebalance else not went
                received = [count for kind, _, count in subject.dispatcher.slo_attainment().moves if kind == "requeue"]
                assert sum(received) == sum(
                    len([e for e in events if isinstance(e, Accepted)]) - 1 for _, events in runs
                )
        assert worst_s[True] < 0.8 * worst_s[False]

    in_virtual_time(scene)


def test_a_replaced_attempt_whose_new_worker_is_lost_is_placed_again() -> None:
    async def scene() -> None:
        async with opened() as subject:
            running = [asyncio.ensure_future(subject.run(each)) for each in asked(8)]
            await asyncio.sleep(0.02)
            asked_now = subject.dispatcher._runner._running["r7"].request
            assert subject.dispatcher._runner.replace_attempt(asked_now.key)
            assert not subject.dispatcher._runner.replace_attempt(asked_now.key)
            assert not subject.dispatcher._runner.replace_attempt(asked_now.retry((), fresh=False).key)
            subject.dispatcher.discovery.clients["prefill-1"].give_up("it is lost")
            events = await running[7]
            assert tokens_of(events) == exact("r7")
            last = [event for event in events if isinstance(event, Accepted)][-1]
            assert last.attempt == 1 and last.prefill_worker != "prefill-1"
            await asyncio.gather(*running)

    in_virtual_time(scene)


@settings(max_examples=25, deadline=None)
@given(
    leaves=st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1.2), st.booleans()), max_size=6),
    looks=st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1.0)), max_size=12),
)
def test_replaced_attempts_leave_nothing_behind_when_clients_leave(
    leaves: list[tuple[int, float, bool]], looks: list[tuple[int, float]]
) -> None:
    """Clients go, or have enough, before, at and after the moment at which a prompt goes elsewhere."""

    async def scene() -> None:
        async with opened() as subject:
            dispatcher, loop = subject.dispatcher, asyncio.get_running_loop()
            tasks = [asyncio.ensure_future(subject.run(each)) for each in asked(10)]
            for number, at_s, cancels in leaves:
                leave = tasks[number].cancel if cancels else lambda number=number: dispatcher.finish(f"r{number}")
                loop.call_later(at_s, leave)
            for number, at_s in looks:
                loop.call_later(at_s, dispatcher._runner.replace_attempt, f"r{number}/0")
            for number, ended in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
                if isinstance(ended, list):
                    count = len(tokens_of(ended))
                    assert tokens_of(ended) == exact(f"r{number}")[:count]
                else:
                    assert isinstance(ended, asyncio.CancelledError), ended

    in_virtual_time(scene)
