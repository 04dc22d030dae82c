"""Prefill on one worker and decode on another, by the workers' own verbs: every pair of parallel settings in turn."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.outputs_reader import OutputsReader
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import TransferReport
from workers.build import build_worker
from workers.config import EngineConfig, ParallelConfig, TransferConfig, WorkerConfig
from workers.request import EngineOutputs, FailedOut, FetchedOut, Output, Request, TicketOut, TokensOut
from workers.worker import Worker

ANSWER_S = 60.0
PARALLEL = tuple(ParallelConfig(*each) for each in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2)))


def words(parallel: ParallelConfig) -> str:
    return f"{parallel.tensor}x{parallel.pipeline}"


async def parallel_worker(
    name: str,
    model: str,
    parallel: ParallelConfig,
    engine: EngineConfig,
    shared: SharedMemory,
    backends: tuple[str, ...] = ("tcp",),
    prefix_tokens: int = 1,
    staging_bytes: int = 0,
) -> Worker:
    config = WorkerConfig(
        name,
        "pool",
        model,
        replace(engine, threads=1),
        parallel,
        TransferConfig(backends=backends),
        secret="of the test",
        prefix_tokens=prefix_tokens,
        staging_bytes=staging_bytes,
    )
    return await build_worker(config, shared=shared).open()


@dataclass(frozen=True, slots=True)
class Moved:
    """One request's tokens, and how its KV moved."""

    tokens: tuple[int, ...]
    report: TransferReport


class Legs:
    """Drives requests over two workers as a dispatcher would. One subscriber for each."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self._prefill = prefill
        self._decode = decode
        self._name = f"{prefill.config.name}>{decode.config.name}"
        self._told: dict[str, asyncio.Queue[Output]] = {}

    async def run(self, requests: Sequence[Request]) -> list[Moved]:
        """All at once."""
        workers = (self._prefill, self._decode)
        subscribing = [asyncio.ensure_future(worker.subscribe(self._name, self._take)) for worker in workers]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.gather(*(self._move(request) for request in requests))
        finally:
            for each in subscribing:
                each.cancel()
            await asyncio.gather(*subscribing, return_exceptions=True)

    def _take(self, message: EngineOutputs) -> None:
        for output in message.outputs:
            self._told[output.key].put_nowait(output)

    async def _move(self, request: Request) -> Moved:
        request = replace(request, id=f"{self._name}:{request.id}", reply_to=self._name)
        outputs = self._told[request.key] = asyncio.Queue()
        tokens: list[int] = []
        report: TransferReport | None = None
        await self._decode.reserve(request, ANSWER_S)
        await self._prefill.prefill(request)
        while True:
            match await outputs.get():
                case TicketOut(_, ticket):
                    await self._decode.fetch(request.key, ticket)
                case FetchedOut(_, report):
                    assert report is not None
                case FailedOut(_, reason):
                    raise AssertionError(f"{self._name}: {reason}")
                case TokensOut() as out:
                    assert out.first_position == len(tokens)
                    tokens += out.tokens
                    if out.prefilled:
                        await self._decode.decode(request.key, (out.tokens[0],))
                    elif out.finish is not None:
                        assert report is not None
                        return Moved(tuple(tokens), report)


async def colocated(worker: Worker, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """The requests' tokens from one worker alone."""
    name = "colocated"
    reader = await OutputsReader.open(worker, name)
    named = [replace(request, reply_to=name) for request in requests]
    tokens: dict[str, list[int]] = {request.key: [] for request in named}
    await asyncio.gather(*(worker.generate(request) for request in named))
    left = len(named)
    async with asyncio.timeout(ANSWER_S):
        while left:
            for output in (await reader.next()).outputs:
                assert isinstance(output, TokensOut), f"{output}"
                tokens[output.key] += output.tokens
                left -= output.finish is not None
    await reader.close()
    return [tuple(tokens[request.key]) for request in named]
