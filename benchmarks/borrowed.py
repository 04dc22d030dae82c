"""Decoding a sequence of which another worker holds a part, against one whose KV is all here.

    local      a worker whose pool holds the sequence
    10 %, ...  a worker with a smaller pool, and a lender: each step sends queries there and gets attention states back
    50 %, waits first   in each layer the wait for the lender ends before the attention to the KV that is here begins

The lender is a process of its own. One sequence is computed at a time.
"""

import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from benchmarks.bundle_reader import BundleReader
from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.shutdown import wait_for_shutdown
from benchmarks.timed_request import random_prompt
from cluster.offline.load.processes import Child
from kvtransfer.ticket import PeerAddress
from workers.build import build_worker
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.executor.remote_kv import RemoteStates
from workers.ops.span import SPAN
from workers.request import FailedOut, Request, SamplingParams, TokensOut
from workers.worker import Worker

ROUNDS = 3
PROMPT, ANSWER = 2048, 64  # tokens
QUICK_PROMPT = 512
BLOCK = 16
CHUNK = 128  # tokens of a step
START_TIMEOUT_S = 120.0
POOLS = {"10 %": 1.02, "50 %": 0.68, "90 %": 0.258}  # of the sequence's tokens; this share of it is then elsewhere
WAITS = "50 %, waits first"
TABLE = f"A sequence of {PROMPT} tokens, part of its KV on another worker"


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ModelError`, `ProcessFailed`, or RuntimeError if a request fails."""
    num_prompt = QUICK_PROMPT if quick else PROMPT
    with Child([sys.executable, "-m", "benchmarks.borrowed", str(2 * (num_prompt + ANSWER))]) as child:
        line = child.wait_line("lender at ", START_TIMEOUT_S).text
        lender = msgspec.json.decode(line.partition("lender at ")[2], type=PeerAddress)
        return asyncio.run(_measure(rounds, num_prompt, lender, progress))


async def _measure(rounds: int, num_prompt: int, lender: PeerAddress, progress: Progress) -> BenchmarkPart:
    token_s: dict[str, list[float]] = defaultdict(list)
    ttft_s: dict[str, list[float]] = defaultdict(list)
    borrowed: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        total = num_prompt + ANSWER
        borrowers = {"local": await _open(stack, "local", 2 * total)}
        for name, share in POOLS.items():
            borrowers[name] = await _open(stack, name, max(int(total * share), 4 * SPAN))
        readers: dict[str, BundleReader] = {}
        for name, worker in borrowers.items():
            readers[name] = await BundleReader.open(worker, "bench")
            stack.push_async_callback(readers[name].close)
        borrowers[WAITS], readers[WAITS] = borrowers["50 %"], readers["50 %"]
        draw = random.Random(0)
        for number in range(rounds):
            for name in borrowers if number % 2 else reversed(borrowers):
                prompt = random_prompt(draw, num_prompt)
                with _waiting_first() if name == WAITS else nullcontext():
                    taken = await _run(borrowers[name], readers[name], lender, prompt, number)
                ttft_s[name].append(taken[0])
                token_s[name].append(taken[1])
                borrowed[name].append(taken[2])
            progress(f"round {number + 1} of {rounds}")
    figures: list[Figure] = []
    for name in borrowers:
        figures += [
            Figure(TABLE, name, "borrowed", "%", spread(borrowed[name])),
            Figure(TABLE, name, "first token", "s", spread(ttft_s[name])),
            Figure(TABLE, name, "each token", "ms", spread(token_s[name])),
            Figure(TABLE, name, "of local", "x", ratios(token_s[name], token_s["local"])),
        ]
    return BenchmarkPart("borrowed", tuple(figures), (), ("Borrower and lender are a process each.",))


@contextmanager
def _waiting_first() -> Iterator[None]:
    """No attention beside the lenders'."""
    ask = RemoteStates.__call__

    def ask_and_wait(self: RemoteStates, layer: int, query: Any) -> Callable[[], Any]:
        states = ask(self, layer, query)()
        return lambda: states

    RemoteStates.__call__ = ask_and_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        RemoteStates.__call__ = ask  # type: ignore[method-assign]


async def _open(stack: AsyncExitStack, name: str, num_tokens: int) -> Worker:
    engine = EngineConfig(kv_blocks=-(-num_tokens // BLOCK), block_size=BLOCK, max_batch_tokens=CHUNK, threads=1)
    engine = replace(engine, prefix_caching=False)
    transfer = TransferConfig(backends=("tcp",), host="127.0.0.1")
    server = build_worker(WorkerConfig(name, name, "smollm2-135m", engine, transfer=transfer, secret="bench"))
    stack.push_async_callback(server.close)
    return await server.open()


async def _run(
    worker: Worker, reader: BundleReader, lender: PeerAddress, prompt: tuple[int, ...], number: int
) -> tuple[float, float, float]:
    """Seconds to the first token, the median for each later one, and the share of the KV that the lender had."""
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=ANSWER, ignore_eos=True)
    request = Request(f"r{number}", prompt, sampling, reply_to="bench")
    begun_s = time.perf_counter()
    await worker.generate(request, (lender,))
    times: list[float] = []
    share = 0.0
    while len(times) < ANSWER:
        for output in (await reader.next()).outputs:
            if isinstance(output, FailedOut):
                raise RuntimeError(output.reason)
            if isinstance(output, TokensOut):
                times += [time.perf_counter()] * len(output.tokens)
        remote = sum(each.num_blocks for each in worker.engine.remote())
        share = max(share, remote * BLOCK / (len(prompt) + max(1, len(times))))
    return times[0] - begun_s, median(later - earlier for earlier, later in pairwise(times)), share


async def _lend(num_tokens: int) -> None:
    """The lender's process, until its input ends."""
    async with AsyncExitStack() as stack:
        lender = await _open(stack, "lender", num_tokens)
        print("lender at", msgspec.json.encode(await lender.address()).decode(), flush=True)
        await wait_for_shutdown()


if __name__ == "__main__":
    asyncio.run(_lend(int(sys.argv[1])))
