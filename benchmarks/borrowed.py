"""Decoding a sequence of which another worker holds a part, against one whose KV is all here.

    local      a worker whose pool holds the sequence
    10 %, ...  a worker with a smaller pool, and a lender: each step sends queries there and gets attention states back

All workers are in this process, so a lender's attention competes with the borrower for cores, as on one host.
"""

import asyncio
import random
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import replace

from benchmarks.bundle_reader import BundleReader
from benchmarks.figures import BenchmarkPart, Figure, Progress, ratios, spread
from benchmarks.timed_request import random_prompt
from workers.build import build_worker
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.ops.span import SPAN
from workers.request import FailedOut, Request, SamplingParams, TokensOut
from workers.worker import Worker

ROUNDS = 3
PROMPT, ANSWER = 2048, 64  # tokens
QUICK_PROMPT = 512
BLOCK = 16
CHUNK = 128  # tokens of a step
SHARES = (0.1, 0.5, 0.9)
TABLE = f"A sequence of {PROMPT} tokens, part of its KV on another worker"


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ModelError`, or RuntimeError if a request fails."""
    return asyncio.run(_measure(rounds, QUICK_PROMPT if quick else PROMPT, progress))


async def _measure(rounds: int, num_prompt: int, progress: Progress) -> BenchmarkPart:
    token_s: dict[str, list[float]] = defaultdict(list)
    ttft_s: dict[str, list[float]] = defaultdict(list)
    borrowed: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        total = num_prompt + ANSWER
        lender = await _open(stack, "lender", 2 * total)
        borrowers = {"local": await _open(stack, "local", 2 * total)}
        for share in SHARES:
            # A borrower keeps two steps' worth of its blocks free, and moves whole spans.
            pool = max(total * (1 - share) + 2 * CHUNK, 4 * SPAN)
            borrowers[f"{share:.0%}"] = await _open(stack, f"b{share:.0%}", int(pool))
        readers: dict[str, BundleReader] = {}
        for name, worker in borrowers.items():
            readers[name] = await BundleReader.open(worker, "bench")
            stack.push_async_callback(readers[name].close)
        draw = random.Random(0)
        for number in range(rounds):
            for name in borrowers if number % 2 else reversed(borrowers):
                taken = await _run(borrowers[name], readers[name], lender, random_prompt(draw, num_prompt), number)
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
    return BenchmarkPart("borrowed", tuple(figures), (), ("Borrower and lender are one process, a thread each.",))


async def _open(stack: AsyncExitStack, name: str, num_tokens: int) -> Worker:
    engine = EngineConfig(kv_blocks=-(-num_tokens // BLOCK), block_size=BLOCK, max_batch_tokens=CHUNK, threads=1)
    engine = replace(engine, prefix_caching=False)
    transfer = TransferConfig(backends=("tcp",), host="127.0.0.1")
    server = build_worker(WorkerConfig(name, name, "smollm2-135m", engine, transfer=transfer, secret="bench"))
    stack.push_async_callback(server.close)
    return await server.open()


async def _run(
    worker: Worker, reader: BundleReader, lender: Worker, prompt: tuple[int, ...], number: int
) -> tuple[float, float, float]:
    """Seconds to the first token, seconds for each later one, and the share of the KV that the lender had."""
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=ANSWER, ignore_eos=True)
    request = Request(f"r{number}", prompt, sampling, reply_to="bench")
    begun_s = time.perf_counter()
    await worker.generate(request, (await lender.address(),))
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
    return times[0] - begun_s, (times[-1] - times[0]) / (ANSWER - 1), share
