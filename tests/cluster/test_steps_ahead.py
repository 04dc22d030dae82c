"""A real model gives the same tokens if the next step waits behind the one in flight, as on a GPU.

Streams join, end at lengths that nobody knows before, are cancelled and handed off.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.spec import ClusterSpec
from tests.cluster.local import Cluster, cluster, mixed_spec, split_spec, tokens_of
from tests.model.tiny import write_tiny_llama
from workers.engine.step import PENDING, StepPlan, StepResult
from workers.executor.rank import Rank
from workers.request import Request, SamplingParams

SAMPLINGS = (
    {"temperature": 0.0, "seed": 4},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 1.3, "seed": 6, "stop_token_ids": tuple(range(0, 320, 17))},
    {"temperature": 1.0, "seed": 7, "min_tokens": 9, "stop_token_ids": tuple(range(0, 320, 5))},
    {"temperature": 0.9, "seed": 8, "top_k": 9, "logprobs": 2},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def real(spec: ClusterSpec, model: Path) -> ClusterSpec:
    pools = tuple(replace(each, engine=replace(each.engine, threads=1)) for each in spec.pools)
    return replace(spec, model=str(model), executor="torch", pools=pools)


async def answers(subject: Cluster) -> dict[str, list[int]]:
    """Of streams that begin one after another; one of them is cancelled, and the last has penalties."""

    async def run(number: int) -> tuple[str, list[int]]:
        await asyncio.sleep(0.03 * number)
        sampling = SamplingParams(max_tokens=12 + number, **SAMPLINGS[number % len(SAMPLINGS)])
        request = Request(f"r{number}", tuple(range(3 + number, 40 + 2 * number)), sampling)
        return request.id, tokens_of(await subject.run(request))

    cancelled = asyncio.ensure_future(
        subject.run(Request("gone", (1, 2, 3), SamplingParams(seed=1, max_tokens=500, ignore_eos=True)))
    )
    found = dict(await asyncio.gather(*map(run, range(10))))
    cancelled.cancel()
    penalties = SamplingParams(seed=9, max_tokens=20, repetition_penalty=1.3)
    found["last"] = tokens_of(await subject.run(Request("last", tuple(range(9, 30)), penalties)))
    await subject.settle()
    return found


@pytest.mark.parametrize("spec", [mixed_spec(block_size=8, kv_blocks=200), split_spec(1, 1, block_size=8)])
async def test_steps_ahead_change_no_token(model: Path, spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(real(spec, model)) as subject:
        expected = await answers(subject)
    pending: list[int] = []
    execute = Rank.execute

    async def counts(self: Rank, plan: StepPlan) -> StepResult:
        pending.append(sum(chunk.tokens == (PENDING,) for chunk in plan.chunks))
        return await execute(self, plan)

    make = Rank.__init__

    def ahead(self: Rank, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.runs_ahead = True

    monkeypatch.setattr(Rank, "execute", counts)
    monkeypatch.setattr(Rank, "__init__", ahead)
    async with cluster(real(spec, model)) as subject:
        assert await answers(subject) == expected
    assert max(pending) > 1, "several streams ran ahead"
    assert len({len(each) for each in expected.values()}) > 4, "some streams ended early"
