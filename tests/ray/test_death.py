"""kill -9 of either side under ten concurrent streams: a pause, and then the very same tokens.

Every case kills a real Ray actor's process at a chosen moment, and then waits until Ray has rebuilt it.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.events import Accepted, Completed
from cluster.frontend.text import TextDelta, TextEvent
from diptych.client import AsyncClient
from diptych.view import ClusterView, WorkerState, WorkerView
from tests.ray.served import laptop, served

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900)]

STREAMS = 10
OUTPUT_TOKENS = 32
ROUNDS = int(os.environ.get("DIPTYCH_CHAOS_ROUNDS", "1"))  # make chaos asks for more
ANSWER_S = 120.0  # a stream that takes longer hangs
SEEDED = {"temperature": 0.8, "top_p": 0.95}

Moment = Callable[[WorkerView, WorkerView], bool]
MOMENTS: dict[str, Moment] = {
    "mid-prefill": lambda prefill, decode: prefill.stats.running > 0 and prefill.stats.queued_tokens > 300,
    "mid-transfer": lambda prefill, decode: prefill.stats.leases > 0 and decode.stats.reserved > 0,
    "mid-decode": lambda prefill, decode: decode.stats.running >= 3,
}


def prompts(case: int) -> list[list[int]]:
    draw = random.Random(case)
    return [[draw.randrange(100, 49_000) for _ in range(draw.choice((20, 60, 120, 300)))] for _ in range(STREAMS)]


def sampling(index: int) -> dict[str, float]:
    """Half of the streams are greedy, half drawn from a seed."""
    return {"temperature": 0.0} if index % 2 else {"seed": index, **SEEDED}


async def stream(client: AsyncClient, index: int, prompt: list[int]) -> list[TextEvent]:
    options = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "timeout_s": ANSWER_S, **sampling(index)}
    return [event async for event in client.generate(prompt, **options)]  # type: ignore[arg-type]


def tokens_of(events: list[TextEvent]) -> list[int]:
    """The tokens; every position must come once and in order."""
    tokens: list[int] = []
    for event in events:
        if isinstance(event, TextDelta):
            assert event.first_position == len(tokens), "a position was repeated or left out"
            tokens += event.tokens
    return tokens


def worker(view: ClusterView, name: str) -> WorkerView:
    return next(each for each in view.workers if each.name == name)


async def until(client: AsyncClient, timeout_s: float, holds: Callable[[ClusterView], bool]) -> ClusterView:
    async with asyncio.timeout(timeout_s):
        while not holds(view := (await client.status()).view):
            await asyncio.sleep(0.02)
    return view


def at_rest(view: ClusterView) -> bool:
    return all(
        each.state is WorkerState.READY and each.stats.free_blocks == each.stats.total_blocks and not each.stats.leases
        for each in view.workers
    ) and view.linked("prefill-0", "decode-0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    document = laptop(health={"dead_after_s": 3.0})
    async with (
        served(document, Path(tmp_path_factory.mktemp("death"))) as subject,
        AsyncClient(subject.endpoint) as client,
    ):
        await client.wait_ready(30.0)
        yield client


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.grid(keep=2)  # one kill of each
@pytest.mark.parametrize("turn", range(ROUNDS))
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_streams_survive_the_death_of_a_worker(client: AsyncClient, victim: str, moment: str, turn: int) -> None:
    made = prompts(turn * 10 + list(MOMENTS).index(moment) * 2 + (victim == "decode-0"))
    await until(client, 60.0, at_rest)
    streams = [asyncio.ensure_future(stream(client, index, prompt)) for index, prompt in enumerate(made)]
    holds = MOMENTS[moment]
    before = await until(client, 30.0, lambda view: holds(worker(view, "prefill-0"), worker(view, "decode-0")))
    os.kill(worker(before, victim).pid, signal.SIGKILL)
    runs = await asyncio.gather(*streams)
    ends = [events[-1] for events in runs if isinstance(events[-1], Completed)]
    assert len(ends) == len(runs)
    hurt = [end for end in ends if end.attempts > 1]
    assert hurt, "nobody noticed the death: it came too late"
    for events, end in zip(runs, ends, strict=True):  # one that finds its decode worker dead is not accepted
        told = [event.attempt for event in events if isinstance(event, Accepted)]
        assert told == sorted(set(told)) and told[-1] == end.attempts - 1

    after = await until(client, 60.0, at_rest)
    assert worker(after, victim).incarnation != worker(before, victim).incarnation
    assert worker(after, victim).restarts == worker(before, victim).restarts + 1
    audit = (await client.status(audit=True)).view
    assert [each.audit for each in audit.workers] == ["clean", "clean"]

    calm = await asyncio.gather(*(stream(client, index, prompt) for index, prompt in enumerate(made)))
    for index, (events, undisturbed) in enumerate(zip(runs, calm, strict=True)):
        assert len(tokens_of(events)) == OUTPUT_TOKENS
        assert tokens_of(events) == tokens_of(undisturbed), f"stream {index} changed"
        assert isinstance(events[-1], Completed)
        events[-1].ledger.check()
