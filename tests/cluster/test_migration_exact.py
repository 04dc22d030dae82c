"""Cut prompts and migrated decodes give the tokens of one worker: a real model, different gangs and blocks."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import Delta, Event
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.runtime.interface import WorkerOrder
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from kvtransfer.open import SharedMemory
from tests.cluster.local import Cluster, cluster, completed, generate, tokens_of
from tests.examples import examples
from tests.model.families import write_family
from tests.model.grammars import GRAMMARS
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import EngineConfig, ParallelConfig, TransferConfig
from workers.request import Request, SamplingParams
from workers.server import WorkerServer

ENGINE = EngineConfig(block_size=8, kv_blocks=96, max_batch_tokens=24, max_running=8, threads=1)
WORKERS = ("one-0", "two-0", "three-0")
SEEDED = {"temperature": 3.0, "top_p": 0.98, "repetition_penalty": 1.1, "frequency_penalty": 0.5}


def three_gangs(model: str, other_size: int) -> ClusterSpec:
    return ClusterSpec(
        model=model,
        pools=(
            PoolSpec("one", Role.MIXED, engine=ENGINE),
            PoolSpec("two", Role.MIXED, engine=ENGINE, parallel=ParallelConfig(3, 1)),
            PoolSpec("three", Role.MIXED, engine=replace(ENGINE, block_size=other_size), parallel=ParallelConfig(1, 2)),
        ),
        transfer=TransferConfig(backends=("memory",)),
        gateway=GatewaySpec(placement_timeout_s=10.0),
        health=HealthSpec(heartbeat_s=0.05, dead_after_s=5.0),
    )


class Gangs:
    """Three workers in this process, kept over all examples: each is asked as it is placed."""

    def __init__(self, subject: Cluster, runner: asyncio.Runner) -> None:
        self.subject = subject
        self._runner = runner
        self._placement = Placement(WORKERS[0], WORKERS[0], "alone")
        subject.dispatcher._policy.choose = self._choose
        self._count = 0

    def _choose(self, query: PlacementQuery) -> Placement:
        return self._placement

    def ask(
        self, request: Request, placement: Placement, moves: tuple[tuple[int, str], ...] = ()
    ) -> tuple[list[Event], list[bool]]:
        """The request as it is placed; its decode moves after so many tokens of the answer to that worker.

        It ends some tokens after the last move, if not before.
        """
        self._placement = placement
        self._count += 1
        return self._runner.run(self._asked(replace(request, id=f"r{self._count}"), list(moves)))

    async def _asked(self, request: Request, moves: list[tuple[int, str]]) -> tuple[list[Event], list[bool]]:
        events: list[Event] = []
        moving: list[asyncio.Task[bool]] = []
        num_moves, behind = len(moves), 0
        async for event in generate(self.subject.dispatcher, request):
            events.append(event)
            if len(moving) == num_moves > 0 and all(each.done() for each in moving):
                behind += 1
                if behind == 10:
                    self.subject.dispatcher.finish(request.id)
            while moves and isinstance(event, Delta) and event.first_position >= moves[0][0]:
                moving.append(asyncio.ensure_future(self.subject.dispatcher.move(request.id, moves.pop(0)[1])))
        moved = list(await asyncio.gather(*moving))
        await self.subject.settle()
        return events, moved


@pytest.fixture(scope="module", params=["attention", "linear attention"])
def gangs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """With linear attention all have blocks of one size."""
    folder, other_size = tmp_path_factory.mktemp("models") / "model", 12
    if request.param == "attention":
        write_tiny_llama(folder, num_layers=3, hidden_size=72, ffn_size=100, num_heads=9, num_kv_heads=3, head_dim=8)
    else:
        write_family(folder, "qwen 3 next", max_position_embeddings=512)
        other_size = 8
    shared = SharedMemory()

    def build(order: WorkerOrder) -> WorkerServer:
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared)

    with asyncio.Runner() as runner:
        opened = cluster(three_gangs(str(folder), other_size), build=build)
        subject = runner.run(opened.__aenter__())
        try:
            yield Gangs(subject, runner)
        finally:
            runner.run(opened.__aexit__(None, None, None))


def asked(length: int, seed: int, max_tokens: int, *, greedy: bool) -> Request:
    prompt = tuple(3 + (7 * seed * (position >= 20) + 11 * position) % 300 for position in range(length))
    drawing: dict[str, Any] = {"temperature": 0.0} if greedy else SEEDED
    grammar = GRAMMARS[seed // 3 % len(GRAMMARS)] if seed % 3 == 0 else None
    sampling = SamplingParams(seed=seed, grammar=grammar, **drawing)
    return Request("", prompt, replace(sampling, max_tokens=max_tokens, ignore_eos=True))


KEPT = examples(20)
PAIRS = [(a, b) for a in WORKERS for b in WORKERS if a != b]


@KEPT
@given(
    length=st.integers(2, 70),
    cut=st.integers(1, 69),
    seed=st.integers(0, 40),
    greedy=st.booleans(),
    pair=st.sampled_from(PAIRS),
)
def test_a_cut_prompt_gives_the_tokens_of_one_worker(
    gangs: Gangs, length: int, cut: int, seed: int, greedy: bool, pair: tuple[str, str]
) -> None:
    request = asked(length, seed, 6, greedy=greedy)
    events, _ = gangs.ask(request, Placement(*pair, "cut", cut_tokens=cut))
    alone, _ = gangs.ask(request, Placement(WORKERS[0], WORKERS[0], "alone"))
    assert tokens_of(events) == tokens_of(alone)
    assert completed(events).attempts == 1
    completed(events).ledger.check()


@KEPT
@given(
    length=st.integers(1, 60),
    seed=st.integers(0, 40),
    greedy=st.booleans(),
    pair=st.sampled_from([*PAIRS, *((name, name) for name in WORKERS)]),
    cut=st.just(0) | st.integers(1, 40),
    moves=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(WORKERS)), min_size=1, max_size=4),
)
def test_a_migrated_decode_gives_the_tokens_of_one_worker(
    gangs: Gangs,
    length: int,
    seed: int,
    greedy: bool,
    pair: tuple[str, str],
    cut: int,
    moves: list[tuple[int, str]],
) -> None:
    ordered = tuple(sorted(moves, key=lambda move: move[0]))
    events, moved = gangs.ask(
        asked(length, seed, 60, greedy=greedy), Placement(*pair, "moved", cut_tokens=cut), ordered
    )
    tokens = tokens_of(events)
    alone, _ = gangs.ask(asked(length, seed, len(tokens), greedy=greedy), Placement(*WORKERS[:1] * 2, "alone"))
    assert tokens == tokens_of(alone)
    end = completed(events)
    assert end.attempts == 1
    assert len(end.transfers) <= sum(moved) + (pair[0] != pair[1]) + len(moves)
    end.ledger.check()


def test_decodes_migrate_between_gangs_of_any_shape(gangs: Gangs) -> None:
    for seed, (owner, taker) in enumerate(PAIRS, start=50):
        request = asked(33, seed, 400, greedy=bool(seed % 2))
        events, moved = gangs.ask(request, Placement(owner, owner, "moved"), ((3, taker),))
        tokens = tokens_of(events)
        alone, _ = gangs.ask(asked(33, seed, len(tokens), greedy=bool(seed % 2)), Placement(*WORKERS[:1] * 2, "alone"))
        assert tokens == tokens_of(alone)
        assert moved == [True], f"{owner} to {taker}"
        first, *_ = completed(events).transfers
        assert first.digests_verified > 0 and first.num_bytes > 0
