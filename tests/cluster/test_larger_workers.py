"""An answer ends where its client or its model ends it, not where one of several workers is full."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.events import Accepted, Event
from cluster.offline.sim import clock
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import PoolSpec, Role
from tests.cluster.local import Cluster, cluster, completed, request, split_spec, tokens_of
from workers.config import EngineConfig
from workers.executor.simulated import simulated_token
from workers.request import FinishReason, Request

SMALL = EngineConfig(kv_blocks=22, block_size=16, max_batch_tokens=64, max_running=16)  # holds 320 tokens
Choose = Callable[[PlacementQuery], Placement | None]


@asynccontextmanager
async def opened(routing: str = "least-loaded", *pools: PoolSpec) -> AsyncIterator[Cluster]:
    spec = split_spec(backends=("simulated",))
    pools = pools or (*spec.pools, PoolSpec("small", Role.DECODE, 1, engine=SMALL))
    gateway = replace(spec.gateway, routing=routing)
    async with cluster(replace(spec, pools=pools, gateway=gateway)) as subject:
        yield subject
        subject.dispatcher._policy.active.check()
        assert not len(subject.dispatcher._policy.active)
        await subject.settle()


def first_to(subject: Cluster, prefill: str, decode: str) -> None:
    """Whatever the policy would say, first attempts go there."""
    policy = subject.dispatcher._policy
    honest = policy.choose
    policy.choose = lambda query: honest(query) if query.request.attempt else Placement(prefill, decode, "a test")


def exact(wanted: Request, count: int) -> list[int]:
    return [simulated_token(f"{wanted.id}/0", len(wanted.prompt) + n, 1000, (0,)) for n in range(count)]


def workers_of(events: list[Event]) -> list[str]:
    return [event.decode_worker for event in events if isinstance(event, Accepted)]


@pytest.mark.parametrize("routing", ["least-loaded", "round-robin", "splitwise", "slo"])
def test_an_answer_is_placed_on_a_worker_with_room(routing: str) -> None:
    async def scene() -> None:
        async with opened(routing) as subject:
            wanted = [request(f"r{n}", 99, max_tokens=800, first=100 * n) for n in range(4)]
            for each, events in zip(wanted, await asyncio.gather(*map(subject.run, wanted)), strict=True):
                assert tokens_of(events) == exact(each, 800)
                assert "small-0" not in workers_of(events)
            short = [request(f"s{n}", 99, max_tokens=20, first=100 * n) for n in range(8)]
            used = {name for events in await asyncio.gather(*map(subject.run, short)) for name in workers_of(events)}
            assert "small-0" in used or routing in ("slo", "splitwise"), "short answers may go anywhere"

    clock.run(scene())


def test_an_answer_that_fills_its_worker_continues_on_a_larger_one() -> None:
    async def scene() -> None:
        async with opened() as subject:
            first_to(subject, "prefill-0", "small-0")
            wanted = request("a", 99, max_tokens=800)
            events = await subject.run(wanted)
            assert workers_of(events) == ["small-0", "decode-0"]
            assert tokens_of(events) == exact(wanted, 800)
            end = completed(events)
            assert (end.finish, end.completion_tokens, end.attempts) == (FinishReason.LENGTH, 800, 1), "nothing failed"
            end.ledger.check()

    clock.run(scene())


@pytest.mark.parametrize("length", [318, 319])
def test_a_prompt_that_fills_its_prefill_worker_does_not_end_the_answer(length: int) -> None:
    async def scene() -> None:
        spec = split_spec()
        async with opened("least-loaded", PoolSpec("prefill", Role.PREFILL, 1, engine=SMALL), spec.pools[1]) as subject:
            wanted = request("a", length, max_tokens=50)
            events = await subject.run(wanted)
            assert tokens_of(events) == exact(wanted, 50) and completed(events).attempts == 1

    clock.run(scene())


@pytest.mark.parametrize(("block_size", "holds"), [(16, 320 + 128 - 16), (24, 480)])
def test_an_answer_that_fills_its_worker_and_all_that_lend_ends_by_length(block_size: int, holds: int) -> None:
    """Blocks of 24 tokens cannot be lent. Of the other's 240 tokens a span of 128 moves; one block stays free."""

    async def scene() -> None:
        spec = split_spec()
        engine = replace(SMALL, block_size=block_size)
        small = PoolSpec("small", Role.DECODE, 1, engine=engine)
        pools = (replace(spec.pools[0], engine=engine), small)
        async with opened("least-loaded", *pools) as subject:
            wanted = request("a", 99, max_tokens=800)
            events = await subject.run(wanted)
            assert completed(events).finish is FinishReason.LENGTH
            assert tokens_of(events) == exact(wanted, holds - 99)

    clock.run(scene())
