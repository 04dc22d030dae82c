"""Parallel pools on Ray with the real model: exact, and replaced as a whole when a rank dies.

The prefill worker is 2 x 1 (SmolLM2's 9 query and 3 KV heads do not divide by two), the decode worker 1 x 2, with other
blocks: every transfer re-shards.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from cluster.events import Completed
from cluster.frontend.text import TextEvent
from diptych.client import AsyncClient
from tests.ray.served import Served, at_rest, laptop, served, streamed_tokens, until, worker
from tests.ray.test_exactness import first_difference, prompts, reference_flips

pytestmark = [
    pytest.mark.full,
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

TIE = 1e-4
OUTPUT_TOKENS = 24
SEEDED = {"temperature": 0.8, "top_p": 0.95}
PROMPTS = (0, 9, 18, 28)  # prompts of 5, 17, 57 and 450 tokens


def document() -> dict[str, Any]:
    made = laptop(health={"dead_after_s": 5.0})
    prefill, decode = made["pools"]
    prefill["parallel"] = {"tensor": 2}
    decode["parallel"] = {"pipeline": 2}
    decode["engine"]["block_size"] = 32
    decode["engine"]["kv_blocks"] = 200
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gangs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, AsyncClient]]:
    async with (
        served(document(), Path(tmp_path_factory.mktemp("gangs"))) as subject,
        AsyncClient(subject.endpoint) as client,
    ):
        await client.wait_ready(30.0)
        yield subject, client


async def stream(client: AsyncClient, prompt: list[int], **sampling: float) -> list[TextEvent]:
    options: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "timeout_s": 300.0, **sampling}
    return [event async for event in client.generate(prompt, **options)]


def ranks(subject: Served) -> set[int]:
    """Processes of the ranks other than leaders, by pid."""
    family = psutil.Process(subject.process.pid).children(recursive=True)
    found = set()
    for process in family:
        try:
            found |= {process.pid} if "_RankActor" in " ".join(process.cmdline()) else set()
        except psutil.NoSuchProcess:
            continue
    return found


async def test_split_gangs_answer_like_transformers(
    gangs: tuple[Served, AsyncClient],
) -> None:
    _, client = gangs
    made = [list(prompts()[index]) for index in PROMPTS]
    runs = await asyncio.gather(*(stream(client, prompt, temperature=0.0) for prompt in made))
    again = await asyncio.gather(*(stream(client, prompt, seed=1, **SEEDED) for prompt in made))
    for events in (*runs, *again):
        done = events[-1]
        assert isinstance(done, Completed)
        done.ledger.check()
        assert done.transfers and all(each.digests_verified for each in done.transfers)
    flips = reference_flips([tuple(prompt) for prompt in made], [streamed_tokens(events) for events in runs])
    assert all(gap < TIE for _, _, gap in flips), f"transformers decides otherwise where it is sure: {flips}"
    repeated = await asyncio.gather(*(stream(client, prompt, seed=1, **SEEDED) for prompt in made))
    assert [streamed_tokens(each) for each in repeated] == [streamed_tokens(each) for each in again]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_dead_rank_ends_its_gang_and_the_pool_replaces_it(
    gangs: tuple[Served, AsyncClient], how: signal.Signals
) -> None:
    subject, client = gangs
    before = await until(client, 60.0, at_rest)
    there = ranks(subject)
    assert len(there) == 2, "one rank beside each leader"
    draw = random.Random(how)
    made = [[draw.randrange(100, 49_000) for _ in range(draw.choice((20, 60, 200)))] for _ in range(4)]
    streams = [asyncio.ensure_future(stream(client, prompt, seed=3, **SEEDED)) for prompt in made]
    await until(client, 60.0, lambda view: worker(view, "decode-0").stats.running > 0)
    victim = draw.choice(sorted(there))
    os.kill(victim, how)
    runs = await asyncio.gather(*streams)
    after = await until(client, 90.0, lambda view: at_rest(view) and _one_restart(before, view))
    assert [each.audit for each in (await client.status(audit=True)).view.workers] == ["clean", "clean"], after
    left = ranks(subject)
    assert len(left) == 2 and victim not in left, "ranks without a leader, or none"
    calm = await asyncio.gather(*(stream(client, prompt, seed=3, **SEEDED) for prompt in made))
    for events, undisturbed in zip(runs, calm, strict=True):
        assert isinstance(events[-1], Completed)
        assert len(streamed_tokens(events)) == OUTPUT_TOKENS
        assert first_difference(streamed_tokens(events), streamed_tokens(undisturbed)) is None


def _one_restart(before: Any, after: Any) -> bool:
    """Exactly one worker is a new incarnation."""
    changed = [each for each in after.workers if worker(before, each.name).incarnation != each.incarnation]
    return len(changed) == 1
