"""Random workers, pairs, requests and faults, in virtual time: every request ends, with the right tokens, and nothing
is left behind.

Pools hold about two prompts, and pairs are drawn at random, so that workers wait for each other in every way: for
reservations, prefixes, loans, migrations and siblings. A cycle of waits would leave a request running.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.changes import ChangeError
from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import AttemptsExhausted, ClusterError, Event, Rejected, Unservable
from cluster.offline.sim import clock
from cluster.offline.sim.environment import RemoteWorker
from cluster.policy.policy import Policy
from cluster.policy.routing.router import Enqueue, Placement, PlacementQuery, Refusal
from cluster.runtime.interface import WorkerHandle, WorkerOrder
from cluster.runtime.local import LocalRuntime, simulated_worker
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from diptych.view import WorkerState
from tests.cluster.local import Cluster, cluster, completed, generate, tokens_of
from tests.examples import examples
from workers.config import BATCHING, ByteSize, CacheConfig, EngineConfig, ParallelConfig, TransferConfig
from workers.costs import LinearCost
from workers.engine.sequence import State
from workers.executor.simulated import AttentionCalls, SimulatedModel
from workers.executor.simulated_steps import simulated_tokens
from workers.request import FinishReason, Request, SamplingParams
from workers.worker import Worker

pytestmark = pytest.mark.hypothesis

COST = LinearCost(0.004, 0.0002, 0.0, 0.001, 0.0, transfer_latency_s=0.002, transfer_byte_s=2e-7)
TOKEN_BYTES = 1024
VOCAB = 1000
ENDS_S = 240.0  # virtual; without faults a request takes less than one second alone
FREE_S = 60.0  # until leases and loans of peers that are gone have expired
MOST_CALL_S = 0.05


class DelayedWorker(RemoteWorker):
    """Each call and each answer takes a time of its own, so that later calls may overtake earlier ones."""

    def __init__(self, worker: WorkerHandle, draw: Random) -> None:
        super().__init__(worker, 0.002)
        self._draw = draw

    async def _call(self, name: str, *args: Any) -> Any:
        if name != "subscribe":
            await asyncio.sleep(self._draw.choice((0.0, 0.001, MOST_CALL_S)) * self._draw.random())
        return await super()._call(name, *args)


class DelayedRuntime(LocalRuntime):
    def __init__(self, draw: Random) -> None:
        model = SimulatedModel(
            1, 1, TOKEN_BYTES // 8, context_length=2048, vocab_size=VOCAB, calls=AttentionCalls(1, 1, 1)
        )
        super().__init__(lambda order: simulated_worker(order, COST, model))
        self._draw = draw

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        return cast(WorkerHandle, DelayedWorker(await super().start_worker(order), self._draw))

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        await super().stop_worker(handle.worker if isinstance(handle, DelayedWorker) else handle, grace_s)


def random_spec(draw: Random) -> ClusterSpec:
    def pool(name: str, role: Role) -> PoolSpec:
        size = draw.choice((8, 16))
        engine = EngineConfig(
            block_size=size,
            kv_blocks=1 + draw.choice((160, 256, 384)) // size,
            max_batch_tokens=draw.choice((16, 32, 64)),
            max_running=draw.choice((2, 4, 16)),
            batching=draw.choice(BATCHING),
            staging_blocks=draw.choice((0, 160 // size)),
        )
        host = ByteSize(draw.choice((0, 20)) * size * TOKEN_BYTES)
        depth = ParallelConfig(pipeline=draw.choice((1, 1, 2)))
        return PoolSpec(
            name, role, draw.choice((1, 2)), engine=engine, parallel=depth, cache=CacheConfig(host), cost=COST
        )

    roles = draw.choice(((Role.MIXED, Role.MIXED), (Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.MIXED)))
    return ClusterSpec(
        model="simulated",
        executor="simulated",
        pools=tuple(pool(name, role) for name, role in zip(("one", "two"), roles, strict=True)),
        transfer=TransferConfig(backends=("simulated",), digest=False, host="127.0.0.1", lease_s=4.0),
        gateway=GatewaySpec(
            replicas=draw.choice((1, 2)),
            placement_timeout_s=20.0,
            routing=draw.choice(("least-loaded", "slo", "mooncake")),
            rebalance=draw.random() < 0.5,
        ),
        health=HealthSpec(heartbeat_s=0.25, dead_after_s=3.0),
    )


def unruly(policy: Policy, draw: Random) -> None:
    """Any two workers may become a pair, and any worker may be asked for a prefix."""
    ruled = policy.choose

    def choose(query: PlacementQuery) -> Placement | Refusal | Enqueue | None:
        found = ruled(query)
        fit = [
            each.name
            for each in query.view.workers
            if each.state is WorkerState.READY
            and each.name not in query.avoid
            and each.capacity_tokens > query.request.num_tokens
        ]
        if not isinstance(found, Placement) or found.lenders or len(fit) < 2:
            return found
        prefill, decode, owner = (draw.choice(fit) for _ in range(3))
        if prefill != decode and not query.view.linked(prefill, decode):
            return found
        cut_tokens = draw.choice((0, draw.randrange(query.request.num_tokens)))
        return Placement(
            prefill, decode, "a test", prefix_owner="" if owner == prefill else owner, cut_tokens=cut_tokens
        )

    policy.choose = choose


def random_requests(draw: Random, largest: int, together: int) -> Iterator[Request]:
    """Some are siblings, some begin alike, and some are longer than any pool."""
    bases = [tuple(draw.randrange(1, VOCAB) for _ in range(together)) for _ in range(3)]
    number = 0
    for group in range(draw.randrange(4, 14)):
        length = draw.choice((draw.randrange(1, 60), draw.randrange(1, largest), largest - 1, together - 1))
        prompt = draw.choice(bases)[: draw.choice((0, length // 2, length))]
        prompt += tuple(draw.randrange(1, VOCAB) for _ in range(length - len(prompt)))
        siblings = draw.choice((1, 1, 1, 2, 3))
        for _ in range(siblings):
            sampling = SamplingParams(seed=number, max_tokens=draw.choice((1, 2, 20, 60)), temperature=0.0)
            yield Request(f"r{number}", prompt, sampling, group=f"g{group}" if siblings > 1 else "")
            number += 1


async def disturb(subject: Cluster, running: "dict[str, asyncio.Task[Any]]", draw: Random) -> None:
    """One fault, at any time of the run."""
    await asyncio.sleep(draw.uniform(0.0, 3.0))
    name = draw.choice([*running])
    workers = [*subject.workers.values()]
    kind = draw.choice(("leave", "leave", "move", "move", "move", "lose", "lose", "unlease", "die", "flip", "drain"))
    if kind == "leave":
        running[name].cancel()
    elif workers:
        await FAULTS[kind](subject, draw.choice(workers), name, draw)


async def move(subject: Cluster, worker: Worker, request: str, draw: Random) -> None:
    for each in subject.dispatchers:
        await each.move(request, worker.config.name)


async def lose(subject: Cluster, worker: Worker, request: str, draw: Random) -> None:
    """A sequence, with or without a message. The calls of a worker end a fetch before its reservation."""
    book = worker.engine.sequences
    if keys := [each.key for each in book if each.state is not State.RESERVED]:
        draw.choice((book.abort, partial(book.fail, reason="a test")))(draw.choice(keys))
        worker._changed()


async def unlease(subject: Cluster, worker: Worker, request: str, draw: Random) -> None:
    if leases := [*worker.engine.leases]:
        worker.engine.leases.drop(draw.choice(leases).key)
        worker._changed()


async def die(subject: Cluster, worker: Worker, request: str, draw: Random) -> None:
    worker._mark_unhealthy(RuntimeError("a test"))


async def flip(subject: Cluster, worker: Worker, request: str, draw: Random) -> None:
    with suppress(ChangeError):
        await subject.controller.flip(worker.config.name, draw.choice([*Role]))


async def drain(subject: Cluster, worker: Worker, request: str, draw: Random) -> None:
    with suppress(ChangeError):
        await subject.controller.drain(worker.config.name, deadline_s=draw.choice((0.1, 3.0)))


FAULTS = {each.__name__: each for each in (move, lose, unlease, die, flip, drain)}


async def one(dispatcher: Dispatcher, request: Request, after_s: float) -> list[Event] | ClusterError:
    """Its events, or the error that a client would see. A wrong position raises."""
    await asyncio.sleep(after_s)
    try:
        return [event async for event in generate(dispatcher, request)]
    except (Rejected, AttemptsExhausted, Unservable) as error:
        return error


async def run(seed: int, faults: int) -> list[ClusterError]:
    """The errors that clients got."""
    draw = Random(seed)
    spec = random_spec(draw)
    async with cluster(spec, runtime=DelayedRuntime(draw)) as subject:
        for dispatcher in subject.dispatchers:
            unruly(dispatcher._policy, draw)
        largest = max(each.engine.max_length for each in subject.workers.values())
        together = max(largest, subject.dispatcher.discovery.together())
        asked = {each.id: each for each in random_requests(draw, largest, together)}
        running = {
            name: asyncio.ensure_future(one(draw.choice(subject.dispatchers), each, draw.choice((0.0, draw.random()))))
            for name, each in asked.items()
        }
        disturbing = [asyncio.ensure_future(disturb(subject, running, draw)) for _ in range(faults)]
        _, left = await asyncio.wait([*running.values(), *disturbing], timeout=ENDS_S)
        assert not left, f"after {ENDS_S:g} s {[name for name, each in running.items() if each in left]} still run"
        for each in disturbing:
            each.result()
        errors = []
        for name, task in running.items():
            if task.cancelled():
                continue
            found = task.result()
            if isinstance(found, ClusterError):
                errors.append(found)
                continue
            request, tokens = asked[name], tokens_of(found)
            assert tokens == simulated_tokens(name, len(request.prompt), len(tokens), VOCAB, frozenset({0}))
            assert completed(found).finish is FinishReason.LENGTH
            completed(found).ledger.check()
        await subject.settle(FREE_S)
        return errors


@examples(12)
@given(seed=st.integers(0, 2**32 - 1))
def test_without_faults_no_request_fails(seed: int) -> None:
    """But those for which there is no room in time."""
    errors = clock.run(run(seed, 0))
    assert all(isinstance(each, Rejected) for each in errors), errors


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), faults=st.integers(1, 8))
def test_with_faults_every_request_ends_and_nothing_is_left(seed: int, faults: int) -> None:
    clock.run(run(seed, faults))
