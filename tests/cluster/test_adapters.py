"""Requests with adapters have the answers of merged weights, wherever they run and whatever happens to them.

A real model, in float32. Greedy tokens must be equal, log probabilities within rounding: merged weights add up in
another order, and so do tensor ranks.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster.events import Delta, Event
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.runtime.interface import WorkerOrder
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from kvtransfer.open import SharedMemory
from tests.cluster.local import Cluster, cluster, completed, tokens_of
from tests.model.adapters import merged, write_adapter
from tests.model.tiny import write_tiny_llama
from workers.build import build_worker
from workers.config import ByteSize, CacheConfig, EngineConfig, ParallelConfig, TransferConfig
from workers.errors import ModelError, Overloaded
from workers.model.adapter import adapter_of
from workers.model.folder import ModelFolder
from workers.request import Adapter, Request, SamplingParams
from workers.server import WorkerServer

ENGINE = EngineConfig(block_size=8, kv_blocks=160, max_batch_tokens=48, max_running=16, threads=1)
PROMPT = tuple(3 + 11 * position % 300 for position in range(45))
SAMPLING = SamplingParams(temperature=0.0, seed=1, max_tokens=200, ignore_eos=True, logprobs=0)
SHORT = replace(SAMPLING, max_tokens=24)

Answer = list[tuple[int, float]]  # tokens and their log probabilities


class Model(NamedTuple):
    """A base model, and by name its adapters and the answers that they should give; None: the base's."""

    path: Path
    adapters: dict[str | None, Adapter | None]
    answers: dict[str | None, Answer]


def spec_of(path: Path, *pools: PoolSpec) -> ClusterSpec:
    return ClusterSpec(
        model=str(path),
        pools=pools,
        transfer=TransferConfig(backends=("memory",)),
        gateway=GatewaySpec(placement_timeout_s=10.0),
        health=HealthSpec(heartbeat_s=0.05, dead_after_s=5.0),
    )


def mixed(name: str, tensor: int = 1, pipeline: int = 1, replicas: int = 1, **engine: object) -> PoolSpec:
    config = replace(ENGINE, **engine)  # type: ignore[arg-type]
    return PoolSpec(name, Role.MIXED, replicas, engine=config, parallel=ParallelConfig(tensor, pipeline))


@asynccontextmanager
async def opened(spec: ClusterSpec, placements: dict[str, Placement] | None = None) -> AsyncIterator[Cluster]:
    """Places each request as its id says, or else as the policy does."""
    shared = SharedMemory()

    def build(order: WorkerOrder) -> WorkerServer:
        return build_worker(order.config, heartbeat_s=order.heartbeat_s, shared=shared)

    async with cluster(spec, build=build) as subject:
        policy = subject.dispatcher._policy
        chosen = policy.choose

        def choose(query: PlacementQuery) -> Any:
            placement = (placements or {}).get(query.request.id)
            return chosen(query) if placement is None or query.avoid else placement

        policy.choose = choose
        yield subject
        await subject.settle()


def answer(events: list[Event]) -> Answer:
    deltas = [event for event in events if isinstance(event, Delta)]
    return [pair for d in deltas for pair in zip(d.tokens, [each.chosen for each in d.logprobs], strict=True)]


def check(found: Answer, wanted: Answer) -> None:
    assert [token for token, _ in found] == [token for token, _ in wanted[: len(found)]]
    for (_, logprob), (_, expected) in zip(found, wanted, strict=False):
        assert logprob == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models")
    size: dict[str, Any] = {"hidden_size": 72, "ffn_size": 100, "num_heads": 9, "num_kv_heads": 3, "head_dim": 8}
    path = write_tiny_llama(folder / "base", num_layers=3, **size)
    folders = {
        "a": write_adapter(folder / "a", path, 1),
        "b": write_adapter(folder / "b", path, 2, rank=8, use_rslora=True),
        "c": write_adapter(folder / "c", path, 3, rank=2, targets=("q_proj", "v_proj", "down_proj")),
    }
    base = ModelFolder(str(path), path)
    adapters: dict[str | None, Adapter | None] = {n: adapter_of(n, each, base) for n, each in folders.items()}
    models: dict[str | None, Path] = {n: merged(path, each, folder / f"{n}-merged") for n, each in folders.items()}

    async def alone(path: Path) -> Answer:
        async with opened(spec_of(path, mixed("one"))) as subject:
            return answer(await subject.run(Request("r", PROMPT, SAMPLING)))

    answers = {name: asyncio.run(alone(each)) for name, each in [(None, path), *models.items()]}
    assert len({tuple(token for token, _ in each) for each in answers.values()}) == 4, "each changes the answer"
    return Model(path, {None: None, **adapters}, answers)


def asked(model: Model, name: str | None, request_id: str = "r", sampling: SamplingParams = SHORT) -> Request:
    return Request(request_id, PROMPT, sampling, adapter=model.adapters[name])


GANGS = (mixed("one"), mixed("tensor", tensor=2), mixed("pipe", pipeline=2), mixed("both", tensor=2, pipeline=2))
PAIRS = [
    ("one-0", "one-0"),
    ("tensor-0", "tensor-0"),
    ("pipe-0", "pipe-0"),
    ("both-0", "both-0"),
    ("one-0", "tensor-0"),
    ("tensor-0", "pipe-0"),
    ("both-0", "one-0"),
]


async def test_batches_of_all_adapters_on_all_splits_equal_merged_weights(model: Model) -> None:
    """Also handed off between them, all at once."""
    placements = {f"{p}>{d}>{name}": Placement(p, d, "test") for p, d in PAIRS for name in model.adapters}
    async with opened(spec_of(model.path, *GANGS), placements) as subject:
        names = [(each, next(n for n in model.adapters if each.endswith(f">{n}"))) for each in placements]
        answers = await asyncio.gather(*(subject.run(asked(model, name, each)) for each, name in names))
        for (_, name), events in zip(names, answers, strict=True):
            assert completed(events).attempts == 1
            check(answer(events), model.answers[name])


async def test_a_decode_migrates_with_its_adapter(model: Model) -> None:
    placements = {name or "none": Placement("one-0", "one-0", "test") for name in model.adapters}
    async with opened(spec_of(model.path, *GANGS[:2]), placements) as subject:
        running = {
            name: await subject.begin(asked(model, name, name or "none", SAMPLING), 3) for name in model.adapters
        }
        for name in running:
            assert await subject.dispatcher.move(name or "none", "tensor-0", None)
        for name, task in running.items():
            check(answer(await task), model.answers[name])


async def test_another_worker_continues_with_the_adapter_when_one_dies(model: Model) -> None:
    placements = {name or "none": Placement("one-0", "two-0", "test") for name in model.adapters}
    async with opened(spec_of(model.path, mixed("one"), mixed("two")), placements) as subject:
        running = {
            name: await subject.begin(asked(model, name, name or "none", SAMPLING), 3) for name in model.adapters
        }
        await subject.workers["two-0"].close()
        for name, task in running.items():
            events = await task
            assert completed(events).attempts == 2
            check(answer(events), model.answers[name])


async def test_cached_prefixes_are_not_shared_between_adapters(model: Model) -> None:
    async with opened(spec_of(model.path, mixed("one"))) as subject:
        for turn, cached in (("first", 0), ("again", 40)):
            for name in model.adapters:
                events = await subject.run(asked(model, name, f"{turn}-{name}"))
                assert completed(events).cached_tokens == cached
                check(answer(events), model.answers[name])


async def test_a_worker_keeps_the_adapters_used_last_within_its_bound(model: Model) -> None:
    a, b, c = (model.adapters[name] for name in "abc")
    assert a is not None and b is not None and c is not None
    most_bytes = ByteSize(a.num_bytes + b.num_bytes)
    spec = spec_of(model.path, replace(mixed("one"), cache=CacheConfig(adapters=most_bytes)))
    async with opened(spec) as subject:
        worker = subject.workers["one-0"]
        for name in ("a", "b", "a", "c"):
            check(answer(await subject.run(asked(model, name, name))), model.answers[name])
        assert worker.engine.stats(adapters=worker._adapters.ids).adapters == (a.id, c.id)
        check(answer(await subject.run(asked(model, "b", "b"))), model.answers["b"])
        assert worker._adapters.ids == (c.id, b.id)
        running = [await subject.begin(asked(model, name, f"long-{name}", SAMPLING), 1) for name in "bc"]
        with pytest.raises(Overloaded, match="adapters of running requests fill"):
            await worker._adapters.use(a)
        for task in running:
            await task
        await worker._adapters.use(a)
        with pytest.raises(ModelError, match=r"takes .* more than cache\.adapters"):
            await worker._adapters.use(replace(a, id="large", num_bytes=most_bytes + 1))


async def test_a_folder_that_changed_is_refused(model: Model, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "d", model.path, 5)
    before = adapter_of("d", folder, ModelFolder(str(model.path), model.path))
    other = write_adapter(tmp_path / "e", model.path, 6)
    (other / "adapter_model.safetensors").replace(folder / "adapter_model.safetensors")
    async with opened(spec_of(model.path, mixed("one", tensor=2))) as subject:
        with pytest.raises(ModelError, match="is not what was loaded as adapter 'd'; unload it, and load it again"):
            await subject.workers["one-0"]._adapters.use(before)
        assert subject.workers["one-0"]._adapters.ids == ()
        assert tokens_of(await subject.run(asked(model, None))) == [token for token, _ in model.answers[None]][:24]
