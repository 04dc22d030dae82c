"""A load that shifts, in virtual time: gateways report, the controller decides, roles follow, and nothing is lost."""

import asyncio
from dataclasses import replace

import pytest

from cluster.events import Event
from cluster.offline.sim.clock import run
from cluster.spec import ClusterSpec, ElasticSpec, Role
from diptych.view import DecisionRecord
from tests.cluster.local import Cluster, cluster, completed, request, split_spec, tokens_of
from workers.costs import LinearCost
from workers.request import SLO

# A prompt of 800 tokens takes 0.4 s; a step of n decodes (10 + n) ms.
COST = LinearCost(0.01, 0.0005, 0.0, 0.001, 0.0, 0.0001, 0.0)
PROMPTS, ANSWERS = (800, 3), (20, 100)  # tokens in and out
LOAD = [(0.25, *PROMPTS)] * 60 + [(0.055, *ANSWERS)] * 250  # a pause, then a request


def shifting(mode: str) -> ClusterSpec:
    spec = split_spec(1, 3, backends=("simulated",), kv_blocks=1000, max_batch_tokens=512, max_running=64)
    return replace(
        spec,
        pools=tuple(replace(pool, cost=COST) for pool in spec.pools),
        transfer=replace(spec.transfer, digest=False, host="127.0.0.1"),
        gateway=replace(spec.gateway, slo=SLO(1.0, 0.05), placement_timeout_s=60.0),
        elastic=ElasticSpec(mode=mode, period_s=0.5, window_s=8.0, dwell_s=1.0, cooldown_s=2.0),
    )


def roles(subject: Cluster) -> list[Role]:
    return sorted((each.role for each in subject.controller.view().workers), key=lambda role: role.value)


async def served(mode: str) -> tuple[list[list[Event]], list[list[Role]], tuple[DecisionRecord, ...]]:
    """What each request got, the roles in the middle and at the end, and the decisions."""
    async with cluster(shifting(mode), COST) as subject:
        streams, seen = [], []
        for index, (pause_s, num_prompt, num_output) in enumerate(LOAD):
            if index == 60:
                seen.append(roles(subject))
            await asyncio.sleep(pause_s)
            asked = request(f"r{index}", num_prompt, max_tokens=num_output, first=37 * index)
            streams.append(asyncio.ensure_future(subject.run(asked)))
        received = await asyncio.gather(*streams)
        seen.append(roles(subject))
        await subject.settle()
        return received, seen, await subject.controller.decisions()


def kept(received: list[list[Event]]) -> float:
    return sum(completed(events).ledger.ttft_ns <= 1e9 for events in received) / len(received)


@pytest.fixture(scope="module")
def still() -> tuple[list[list[Event]], list[list[Role]], tuple[DecisionRecord, ...]]:
    return run(served("off"))


def test_roles_follow_the_load_and_no_token_changes(
    still: tuple[list[list[Event]], list[list[Role]], tuple[DecisionRecord, ...]],
) -> None:
    received, (after_prompts, after_answers), decisions = run(served("act"))
    assert after_prompts.count(Role.PREFILL) > 1, "prompts got more workers"
    assert after_answers.count(Role.PREFILL) < after_prompts.count(Role.PREFILL), "and answers got them back"
    assert len(decisions) >= 2 and {taken.outcome for taken in decisions} == {"done"}
    assert all("requests/s" in taken.decision.reason for taken in decisions)
    assert [tokens_of(events) for events in received] == [tokens_of(events) for events in still[0]]
    assert all(completed(events).attempts == 1 for events in received), "no flip costs an attempt"
    assert kept(received) > kept(still[0])


@pytest.mark.full
def test_advice_does_not_change_roles(
    still: tuple[list[list[Event]], list[list[Role]], tuple[DecisionRecord, ...]],
) -> None:
    received, seen, decisions = run(served("advise"))
    assert seen == still[1] and still[2] == ()
    assert decisions and {taken.outcome for taken in decisions} == {"advised"}
    assert kept(received) == kept(still[0])
