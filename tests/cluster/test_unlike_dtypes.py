"""Pools whose KV has unlike dtypes: an answer does not depend on what was asked, cached or lost before. A real model.

Log probabilities are compared to the last digit: they show a rounding that is other where tokens may not yet.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.outputs_reader import OutputsReader
from cluster.events import Delta, Event
from cluster.spec import ClusterSpec
from tests.cluster.local import Cluster, cluster, completed, generate, split_spec
from tests.model.families import write_family
from workers.request import Request, SamplingParams, TokensOut

PROMPT = tuple(3 + 11 * position % 300 for position in range(70))
SAMPLING = SamplingParams(temperature=0.0, seed=1, max_tokens=24, ignore_eos=True, logprobs=0)
FIRST = Request("first", PROMPT, SAMPLING)

Answer = list[tuple[int, float]]  # tokens and their log probabilities


@pytest.fixture(scope="module", params=[("float32", "bfloat16"), ("float32", "int8"), ("int8", "fp8")], ids="-".join)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    folder: Path = tmp_path_factory.mktemp("models") / "m"
    write_family(folder, "llama 3")
    spec = split_spec(backends=("tcp",), block_size=8, kv_blocks=96)
    prefill, decode = spec.pools
    engine = replace(prefill.engine, threads=1, deterministic=True)
    engines = (replace(engine, dtype=dtype) for dtype in request.param)
    pools = tuple(replace(pool, engine=each) for pool, each in zip((prefill, decode), engines, strict=True))
    return replace(spec, model=str(folder), executor="torch", pools=pools)


@asynccontextmanager
async def opened(spec: ClusterSpec) -> AsyncIterator[Cluster]:
    async with cluster(spec) as subject:
        yield subject
        await subject.settle()


def answer(events: list[Event]) -> Answer:
    deltas = [event for event in events if isinstance(event, Delta)]
    return [pair for d in deltas for pair in zip(d.tokens, [each.chosen for each in d.logprobs], strict=True)]


async def ask(subject: Cluster, wanted: Request) -> Answer:
    return answer(await subject.run(wanted))


def second_turn(first: Answer) -> Request:
    return Request("second", (*PROMPT, *(token for token, _ in first), *range(5, 17)), SAMPLING)


async def test_a_cached_prompt_gives_the_same_answer(spec: ClusterSpec) -> None:
    async with opened(spec) as subject:
        first = await ask(subject, FIRST)
        assert await ask(subject, replace(FIRST, id="again")) == first
        events = await subject.run(second_turn(first))
        assert completed(events).transfers[0].reused_blocks == len(PROMPT) // 8, (
            "what came from the prefill pool is found again"
        )
        warm = answer(events)
    async with opened(spec) as subject:
        assert await ask(subject, second_turn(first)) == warm


async def alone(subject: Cluster, name: str) -> Answer:
    """The first request's answer from the decode worker alone."""
    worker = subject.workers["decode-0"]
    reader = await OutputsReader.open(worker, name)
    outputs: list[TokensOut] = []
    await worker.generate(replace(FIRST, id=name, reply_to=name))
    while not outputs or outputs[-1].finish is None:
        outputs += [output for output in (await reader.next()).outputs if isinstance(output, TokensOut)]
    await reader.close()
    return [(output.tokens[0], output.logprobs[0].chosen) for output in outputs]


async def test_blocks_of_different_dtypes_are_not_mixed_up(spec: ClusterSpec) -> None:
    async with opened(spec) as subject:
        cold = await ask(subject, FIRST)
        by_itself = await alone(subject, "alone")
        assert by_itself != cold, "otherwise this proves nothing"
    async with opened(spec) as subject:
        assert await alone(subject, "alone") == by_itself
        assert await ask(subject, FIRST) == cold
        assert await alone(subject, "once more") == by_itself


@pytest.mark.parametrize("lost_after", [2, 9])
async def test_a_restart_on_another_worker_of_the_pool_gives_the_same_answer(
    spec: ClusterSpec, lost_after: int
) -> None:
    prefill, decode = spec.pools
    spec = replace(spec, pools=(prefill, replace(decode, replicas=2)))
    async with opened(spec) as subject:
        whole = await ask(subject, FIRST)
    async with opened(spec) as subject:
        events: list[Event] = []
        async for event in generate(subject.dispatcher, FIRST):
            events.append(event)
            if isinstance(event, Delta) and event.first_position == lost_after - 1:
                (worker,) = [each for each in subject.workers.values() if len(each.engine.sequences)]
                (lost,) = worker.engine.sequences
                worker.engine.sequences.fail(lost.key, "the test loses it")
                worker._changed()
        assert completed(events).attempts == 2 and answer(events) == whole
