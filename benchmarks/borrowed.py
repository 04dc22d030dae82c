"""Decoding a sequence of which another worker holds a part, against one whose KV is all here.

    local      a worker whose pool holds the sequence
    10 %, ...  a worker with a smaller pool, and a lender: each step sends queries there and gets attention states back

The lender is a process of its own. One sequence is computed at a time.
"""

import asyncio
import random
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from itertools import pairwise
from statistics import median

import msgspec

from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.outputs_reader import OutputsReader
from benchmarks.shutdown import wait_for_shutdown
from benchmarks.timed_request import random_prompt
from cluster.offline.load.processes import Child
from kvtransfer.ticket import PeerAddress
from workers.build import build_worker
from workers.config import SPAN, EngineConfig, TransferConfig, WorkerConfig
from workers.request import FailedOut, Request, SamplingParams, TokensOut
from workers.worker import Worker

ROUNDS = 3
PROMPT, ANSWER = 2048, 64  # tokens
BLOCK = 16
CHUNK = 128  # tokens of a step
START_TIMEOUT_S = 120.0
LOCAL = "local"
POOLS = {LOCAL: 2.0, "10 %": 1.02, "50 %": 0.68, "90 %": 0.258}  # of the sequence; this share of it is then elsewhere
TABLE = "A sequence, part of its KV on another worker"


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ModelError`, `ProcessFailed`, or RuntimeError if a request fails."""
    with Child([sys.executable, "-m", "benchmarks.borrowed", str(2 * (PROMPT + ANSWER))]) as child:
        line = child.wait_line("lender at ", START_TIMEOUT_S).text
        lender = msgspec.json.decode(line.partition("lender at ")[2], type=PeerAddress)
        return asyncio.run(_measure(rounds, lender, progress))


async def _measure(rounds: int, lender: PeerAddress, progress: Progress) -> BenchmarkPart:
    taken: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        borrowers: dict[str, tuple[Worker, OutputsReader]] = {}
        for name, share in POOLS.items():
            worker = await _open(stack, name, max(int((PROMPT + ANSWER) * share), 4 * SPAN))
            borrowers[name] = worker, await OutputsReader.open(worker, "bench")
            stack.push_async_callback(borrowers[name][1].close)
        draw = random.Random(0)
        for number in range(rounds):
            for name in borrowers if number % 2 else reversed(borrowers):
                prompt = random_prompt(draw, PROMPT)
                taken[name].append(await _run(*borrowers[name], lender, prompt, number))
            progress(f"round {number + 1} of {rounds}")
    figures: list[Figure] = []
    for name in borrowers:
        first_s, token_s, borrowed = map(list, zip(*taken[name], strict=True))
        figures += [
            Figure(TABLE, name, "borrowed", "%", spread(borrowed)),
            Figure(TABLE, name, "first token", "s", spread(first_s)),
            Figure(TABLE, name, "each token", "ms", spread(token_s)),
            Figure(TABLE, name, "of local", "x", ratios(token_s, [each[1] for each in taken[LOCAL]])),
        ]
    note = f"{PROMPT:,} tokens and {ANSWER} more. Borrower and lender are a process each."
    return BenchmarkPart("borrowed", tuple(figures), (), (note,))


async def _open(stack: AsyncExitStack, name: str, num_tokens: int) -> Worker:
    engine = EngineConfig(
        kv_blocks=-(-num_tokens // BLOCK),
        block_size=BLOCK,
        max_batch_tokens=CHUNK,
        threads=1,
        prefix_caching=False,
    )
    transfer = TransferConfig(backends=("tcp",), host="127.0.0.1")
    server = build_worker(WorkerConfig(name, name, "smollm2-135m", engine, transfer=transfer, secret="bench"))
    stack.push_async_callback(server.close)
    return await server.open()


async def _run(
    worker: Worker, reader: OutputsReader, lender: PeerAddress, prompt: tuple[int, ...], number: int
) -> tuple[float, float, float]:
    """Seconds to the first token, the median for each later one, and the share of the KV that the lender had."""
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=ANSWER, ignore_eos=True)
    begun_s = time.perf_counter()
    await worker.generate(Request(f"r{number}", prompt, sampling, reply_to="bench"), (lender,))
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
