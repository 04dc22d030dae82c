"""Random changes in random order under load, in virtual time: no request is lost, no token differs, nothing leaks."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.changes import ChangeError
from cluster.events import Event
from cluster.offline.sim.clock import run
from cluster.spec import ClusterSpec, Role
from diptych.view import WorkerState
from tests.cluster.local import FAST, Cluster, cluster, completed, request, split_spec, tokens_of
from workers.request import SLO, Request

pytestmark = pytest.mark.hypothesis

POOLS = ("prefill", "decode")
WORKERS = st.tuples(st.sampled_from(POOLS), st.integers(0, 3)).map(lambda each: f"{each[0]}-{each[1]}")
FLIPS = st.tuples(st.just("flip"), WORKERS, st.sampled_from(Role))
DRAINS = st.tuples(st.just("drain"), WORKERS, st.sampled_from((0.05, 1.0, 30.0)))
SCALES = st.tuples(st.just("scale"), st.sampled_from(POOLS), st.integers(0, 4))
DEATHS = st.tuples(st.just("die"), WORKERS, st.none())
CHANGES = st.lists(st.tuples(st.floats(0.0, 0.8), st.one_of(FLIPS, DRAINS, SCALES, DEATHS)), min_size=1, max_size=10)
REQUESTS = 12
SPEC = split_spec(2, 2, backends=("simulated",))
SPEC = replace(SPEC, transfer=replace(SPEC.transfer, digest=False, host="127.0.0.1"))
# Ours: decodes move off workers that are to prefill, and prompts that have not begun are placed anew.
REBALANCED = replace(
    SPEC,
    gateway=replace(SPEC.gateway, routing="slo", rebalance=True, slo=SLO(ttft_s=0.02, tpot_s=0.05)),
    pools=tuple(replace(pool, cost=FAST) for pool in SPEC.pools),
)


def asked(index: int) -> Request:
    return request(f"r{index}", 30 + index, max_tokens=100)


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    return run(undisturbed())


async def change(subject: Cluster, verb: str, target: str, value: object) -> None:
    control = subject.controller
    if verb == "die":
        if target in subject.workers:
            subject.workers[target]._mark_unhealthy(RuntimeError("a test"))
        return
    try:
        if verb == "flip":
            assert isinstance(value, Role)
            await control.flip(target, value)
        elif verb == "drain":
            assert isinstance(value, float)
            await control.drain(target, deadline_s=value)
        else:
            assert isinstance(value, int)
            await control.scale(target, value)
    except ChangeError:
        pass  # refused, and nothing has changed


async def settled(subject: Cluster) -> None:
    """Whoever shall leave has left, and whoever shall be is ready."""
    control = subject.controller
    async with asyncio.timeout(200):
        view = control.view()
        while not all(each.state is WorkerState.READY for each in view.workers):
            await control.members(view.revision, 10.0)
            view = control.view()


async def undisturbed() -> list[list[int]]:
    async with cluster(SPEC) as subject:
        received = await asyncio.gather(*(subject.run(asked(index)) for index in range(REQUESTS)))
        return [tokens_of(events) for events in received]


async def under_load(
    spec: ClusterSpec, changes: list[tuple[float, tuple[str, str, object]]], tokens: list[list[int]]
) -> None:
    async with cluster(spec) as subject:

        async def one(index: int) -> list[Event]:
            await asyncio.sleep(0.1 * index)
            return await subject.run(asked(index))

        streams = [asyncio.ensure_future(one(index)) for index in range(REQUESTS)]
        for pause_s, (verb, target, value) in changes:
            await asyncio.sleep(pause_s)
            await change(subject, verb, target, value)
        received = await asyncio.gather(*streams)
        await settled(subject)
        view = subject.controller.view()
        assert {each.name for each in view.workers} == set(subject.workers), "who was let go is stopped, and no other"
        assert {pool.name: pool.wanted for pool in view.pools} == {
            name: sum(each.pool == name for each in view.workers) for name in POOLS
        }
        names = {each.name for each in view.workers}
        assert all(link.owner in names and link.reader in names for link in view.links)
        for phase in (Role.PREFILL, Role.DECODE):
            assert any(each.role in (phase, Role.MIXED) for each in view.workers), "a floor was broken"
        for index, events in enumerate(received):
            assert tokens_of(events) == tokens[index]
            completed(events).ledger.check()
        again = [subject.run(request(f"again-{index}", 30 + index, max_tokens=20)) for index in range(REQUESTS)]
        assert all(completed(events).attempts == 1 for events in await asyncio.gather(*again)), "the cluster is whole"
        await subject.settle()


@settings(max_examples=10, deadline=None)
@given(spec=st.sampled_from([SPEC, REBALANCED]), changes=CHANGES)
def test_random_changes_lose_no_token(
    tokens: list[list[int]], spec: ClusterSpec, changes: list[tuple[float, tuple[str, str, object]]]
) -> None:
    run(under_load(spec, changes, tokens))
