"""Predicted waits for a reservation, against the engine's decisions, and scored."""

import asyncio
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_stats

from cluster.events import Accepted, Delta
from cluster.offline.sim.clock import run
from cluster.offline.sim.cluster import open_cluster
from cluster.policy.estimate.reservation_wait import ReservationWait
from cluster.policy.routing.router import Placement
from diptych.view import ClusterView
from tests.cluster.local import generate
from tests.engine.driving import model_facts
from tests.offline.sim.cases import ENGINE, models, split
from tests.policy.views import BLOCK, SIMPLE, Story, request, view, worker
from workers.config import EngineConfig
from workers.costs import LinearCost
from workers.engine.engine import Engine
from workers.errors import Overloaded
from workers.request import Request, SamplingParams

COST = LinearCost(0.001, 0.0002, 0.0, 0.01, 0.0, 0.0, 0.0)
BY_HAND = Placement("p0", "d0", "by hand")


def opened(**engine: int) -> Engine:
    config = EngineConfig(**{"block_size": BLOCK, "max_batch_tokens": 100_000} | engine)  # type: ignore[arg-type]
    return Engine(config, model_facts(context_length=1 << 20, vocab_size=1 << 20), cost=SIMPLE)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=24),
    begun=st.lists(st.booleans(), min_size=24, max_size=24),
    blocks=st.integers(60, 300),
    slots=st.integers(2, 20),
    staging=st.sampled_from([0, 20, 40]),
)
def test_a_wait_is_predicted_exactly_where_the_engine_would_make_it_wait(
    lengths: list[int], begun: list[bool], blocks: int, slots: int, staging: int
) -> None:
    settings_: dict[str, Any] = {"kv_blocks": blocks, "max_running": slots, "staging_blocks": staging}
    engine, story = opened(**settings_), Story("random", **settings_)
    reserving = ReservationWait(story.policy._latency, story.policy.active)

    def picture() -> ClusterView:
        return view(worker("p0"), with_stats(worker("d0"), stats=engine.stats()))

    for number, length in enumerate(lengths):
        wanted = request(f"r{number}", length, max_tokens=50, first=1 + 700 * number)
        ask = story.ask(picture(), wanted)
        wait_s = reserving.seconds(ask, ask.view.workers[1])
        try:
            engine.reservations.reserve(wanted, story.now_s)
        except Overloaded:
            assert wait_s > 0.0
            return
        assert wait_s == 0.0
        story.policy.began(ask, BY_HAND)
        story.policy.active.reserved(wanted.key, story.now_s)
        if begun[number]:
            story.prefilled(wanted)
            engine.reservations.fetched(wanted.key, story.now_s)
            engine.reservations.decode(wanted.key, (1,), story.now_s)


def test_earlier_reservations_go_first() -> None:
    story = Story("random", max_running=1)
    reserving = ReservationWait(story.policy._latency, story.policy.active)
    waits_s = []
    for number in range(4):
        wanted = request(f"r{number}", 100, max_tokens=11, first=200 * number)
        busy = worker("d0", running=bool(number), used=7 * bool(number))
        ask = story.ask(view(worker("p0"), busy), wanted)
        waits_s.append(reserving.seconds(ask, busy))
        story.policy.began(ask, BY_HAND)
        if not number:
            story.policy.active.reserved(wanted.key, story.now_s)
            story.prefilled(wanted)
    assert waits_s == [0.0, *(pytest.approx(each) for each in (0.11, 0.32, 0.53))], "eleven tokens, and a prompt each"


def told_and_seen(engine: EngineConfig, count: int = 40) -> list[tuple[float, float]]:
    """Predicted and actual TTFT of requests that arrive much faster than they are served."""

    async def scene() -> list[tuple[float, float]]:
        spec = split(engine=engine)
        spec = replace(spec, gateway=replace(spec.gateway, placement_timeout_s=1000.0))
        async with open_cluster(spec, models(spec, COST)) as cluster:
            (dispatcher,) = cluster.dispatchers

            async def one(number: int) -> tuple[float, float]:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(0.03 * number)
                prompt = tuple((37 * number + index) % 900 + 1 for index in range(100 + number % 7 * 40))
                begin_s, told_s, seen_s = loop.time(), 0.0, 0.0
                wanted = Request(f"r{number}", prompt, SamplingParams(seed=1, max_tokens=20 + number % 5 * 10))
                async for event in generate(dispatcher, wanted):
                    if isinstance(event, Accepted) and event.predicted_ttft_s is not None:
                        told_s = event.predicted_ttft_s
                    elif isinstance(event, Delta):
                        seen_s = seen_s or loop.time() - begin_s
                return told_s, seen_s

            return await asyncio.gather(*(one(number) for number in range(count)))

    return run(scene())


@pytest.mark.parametrize("scarce", [{"max_running": 4}, {"kv_blocks": 60}])
def test_the_wait_for_a_slot_or_for_blocks_is_in_the_predicted_first_token(scarce: dict[str, int]) -> None:
    """The wait is nearly all of TTFT: seconds, while queue and prompt take a twentieth of a second."""
    pairs = told_and_seen(replace(ENGINE, **scarce))  # type: ignore[arg-type]
    assert statistics.median(seen_s for _, seen_s in pairs) > 2.0
    errors = sorted((seen_s - told_s) / told_s for told_s, seen_s in pairs)
    assert errors[len(errors) // 10] > -0.5 and errors[-1 - len(errors) // 10] < 0.25
