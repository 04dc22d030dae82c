"""Paced streams on one server over gRPC or OpenAI's HTTP: arrival time of each token, and the server's CPU time."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from cluster.events import Completed
from cluster.frontend.text import TextDelta
from cluster.offline.load.processes import ProcessFailed
from diptych.client import AsyncClient

PROMPT = tuple(range(400, 432))
ANSWER_S = 300.0
STAGGER = 0.2  # streams start one after another over this share of a stream's duration

Ask = Callable[[int], AsyncGenerator[int, None]]  # wanted tokens -> tokens of each message


@dataclass(frozen=True, slots=True)
class Steady:
    """The interval in which all streams run: from the last stream's first token to the first stream's end.

    `late_s`: each token's delay behind its stream's pace, measured from the stream's earliest token.
    """

    tokens: int
    wall_s: float
    cpu_s: float
    late_s: tuple[float, ...]

    @property
    def token_cpu_s(self) -> float:
        return self.cpu_s / self.tokens

    @property
    def core_share(self) -> float:
        return self.cpu_s / self.wall_s

    def late(self, share: float) -> float:
        """The quantile `share` of the lateness."""
        return sorted(self.late_s)[min(len(self.late_s) - 1, int(share * len(self.late_s)))]


Marks = list[tuple[float, int]]  # arrival time of each message, and the tokens so far


async def steady(ask: Ask, cpu_s: Callable[[], float], streams: int, tokens: int, period_s: float) -> Steady:
    """`streams` concurrent answers of `tokens` tokens. Raises `ProcessFailed` when they never ran all at once."""
    received: list[Marks] = [[] for _ in range(streams)]
    waiting, all_begun = set(range(streams)), asyncio.Event()

    async def follow(index: int) -> None:
        await asyncio.sleep(STAGGER * tokens * period_s * index / streams)
        count = 0
        async for new in ask(tokens):
            count += new
            received[index].append((time.perf_counter(), count))
            waiting.discard(index)
            if not waiting:
                all_begun.set()
        if count != tokens:
            raise ProcessFailed(f"stream {index} had {count} tokens instead of {tokens}")

    async with asyncio.TaskGroup() as group:
        following = [group.create_task(follow(index)) for index in range(streams)]
        begun = asyncio.ensure_future(all_begun.wait())
        await asyncio.wait([begun, *following], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        before_s, from_s = cpu_s(), time.perf_counter()
        await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
        after_s, until_s = cpu_s(), time.perf_counter()
    count = sum(_tokens_within(marks, from_s, until_s) for marks in received)
    if count < streams:
        raise ProcessFailed(f"{streams} streams of {tokens} tokens never ran all at once; try again")
    late_s = tuple(late for marks in received for late in lateness(marks, period_s))
    return Steady(count, until_s - from_s, after_s - before_s, late_s)


def _tokens_within(marks: Sequence[tuple[float, int]], from_s: float, until_s: float) -> int:
    before = 0
    found = 0
    for at_s, count in marks:
        if from_s <= at_s < until_s:
            found += count - before
        before = count
    return found


def lateness(marks: Sequence[tuple[float, int]], period_s: float) -> list[float]:
    """Seconds of each token behind the stream's pace, measured from its earliest token."""
    offsets: list[float] = []
    for at_s, count in marks:
        offsets += [at_s - position * period_s for position in range(len(offsets), count)]
    earliest = min(offsets)
    return [offset - earliest for offset in offsets]


async def one_token_each(ask: Ask, cpu_s: Callable[[], float], requests: int, concurrency: int) -> float:
    """CPU seconds per request, over `requests` requests for one token."""
    left = iter(range(requests))

    async def send_all() -> None:
        for _ in left:
            count = sum([new async for new in ask(1)])
            if count != 1:
                raise ProcessFailed(f"a request for one token had {count}")

    before_s = cpu_s()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(send_all())
    return (cpu_s() - before_s) / requests


@asynccontextmanager
async def grpc_streams(endpoint: str) -> AsyncIterator[Ask]:
    """One connection for all streams, as gRPC clients do. Raises `DiptychError`."""
    async with AsyncClient(endpoint) as client:

        async def ask(tokens: int) -> AsyncGenerator[int, None]:
            answer = client.generate(
                PROMPT, max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True, timeout_s=ANSWER_S
            )
            counted = None
            async for event in answer:
                if isinstance(event, TextDelta) and event.tokens:
                    yield len(event.tokens)
                elif isinstance(event, Completed):
                    counted = event.completion_tokens
            _check_count(tokens, counted)

        yield ask


@asynccontextmanager
async def http_streams(url: str, uniform_text: bool) -> AsyncIterator[Ask]:
    """One connection per stream. With `uniform_text`, the length of a message's text gives its number of tokens.

    Without it, each message counts as one token, and tokens beyond that are added at the end, by the server's usage.
    """
    body = {"prompt": list(PROMPT), "temperature": 0.0, "seed": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    limits = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:

        async def ask(tokens: int) -> AsyncGenerator[int, None]:
            counted, letters, received = None, 0, 0
            async with session.post(f"{url}/v1/completions", json=body | {"max_tokens": tokens}) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if chunk.get("usage"):
                        counted = chunk["usage"]["completion_tokens"]
                    elif text := chunk["choices"][0]["text"]:
                        letters = letters or len(text)
                        new = len(text) // letters if uniform_text else 1
                        received += new
                        yield new
            if not uniform_text and counted is not None and counted > received:
                yield counted - received
            _check_count(tokens, counted)

        yield ask


def _check_count(wanted: int, counted: int | None) -> None:
    if counted != wanted:
        raise ProcessFailed(f"the server counted {counted} tokens instead of {wanted}")
