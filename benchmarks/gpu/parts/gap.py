"""Running streams while long prompts arrive, on one device: prefill and decode in two processes, or chunked in one.

The two processes of a split share the device by time slices, as two processes always do.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.llama import TINY, LlamaShape
from benchmarks.gpu.model_folder import write_model
from benchmarks.gpu.served import SHARED_MEMORY, Caller, TimedTokens, served
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.request import Request, SamplingParams

LLAMA_3B = LlamaShape(28, 3072, 8192, 24, 8, 128, 128256)  # Llama 3.2 3B
Ask = Callable[..., Coroutine[Any, Any, TimedTokens]]  # of `Caller`, with its workers
WARM_S = 30.0


@dataclass(frozen=True, slots=True)
class StreamsAndPrompts:
    """Streams that decode all the time, and long prompts, one every `every_s`."""

    streams: int
    stream_tokens: int  # of a prompt
    most_tokens: int  # of an answer: streams are cancelled at the end
    prompts: int
    prompt_tokens: int
    every_s: float
    answer_tokens: int = 8


FULL, SMALL = StreamsAndPrompts(16, 64, 8000, 10, 8192, 0.4), StreamsAndPrompts(4, 16, 1500, 3, 200, 0.05)


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Gaps between the tokens of the streams (ms), tokens per second, and the long prompts' TTFT (ms)."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        shape, dtype = (TINY, torch.float32) if tiny else (LLAMA_3B, torch.bfloat16)
        model = write_model(Path(folder) / "model", shape, device, dtype, 16384)
        return asyncio.run(_measured(model, device, str(dtype).removeprefix("torch."), shape.vocab, tiny=tiny))


async def _measured(model: Path, device: torch.device, dtype: str, vocab: int, *, tiny: bool) -> dict[str, object]:
    on_gpu, load = device.type == "cuda", SMALL if tiny else FULL
    small, large = (64, 128) if tiny else (512, 2048)
    budgets = {"prefill": large, "decode": small, f"chunked_{small}": small, f"chunked_{large}": large}
    configs = [
        WorkerConfig(
            name,
            name,
            str(model),
            EngineConfig(
                kv_blocks=0 if on_gpu else 512, max_batch_tokens=tokens, device=str(device), dtype=dtype, threads=1
            ),
            transfer=TransferConfig(backends=("cuda_ipc", "tcp") if on_gpu else ("tcp",)),
            memory_part=1 / len(budgets),
        )
        for name, tokens in budgets.items()
    ]
    figures: dict[str, object] = {"prompt_tokens": load.prompt_tokens, "streams": load.streams}
    async with served(configs, {}) as workers, Caller(*workers) as caller:
        prefill, decode, *chunked = workers
        figures["open_s"] = max(each.opened.seconds for each in workers)
        ask: Ask = partial(caller.split, prefill=prefill, decode=decode)
        figures |= await _under_load("split", ask, caller.cancel, load, vocab)
        for worker in chunked:
            ask = partial(caller.alone, worker=worker)
            figures |= await _under_load(worker.name, ask, caller.cancel, load, vocab)
    return figures


async def _under_load(
    name: str, ask: Ask, cancel: Callable[[str], Awaitable[None]], load: StreamsAndPrompts, vocab: int
) -> dict[str, object]:
    """The streams' gaps from the first long prompt's arrival to the last one's answer; one before warms up."""
    rng = random.Random(0)

    def request(key: str, num_tokens: int, answer: int) -> Request:
        prompt = tuple(rng.randrange(3, vocab) for _ in range(num_tokens))
        return Request(f"{key} {name}", prompt, SamplingParams(0.0, seed=0, max_tokens=answer, ignore_eos=True))

    streams = [request(f"stream {each}", load.stream_tokens, load.most_tokens) for each in range(load.streams)]
    prompts = [request(f"prompt {each}", load.prompt_tokens, load.answer_tokens) for each in range(load.prompts + 1)]
    running = [TimedTokens(time.monotonic()) for _ in streams]
    tasks = [asyncio.ensure_future(ask(each, into=into)) for each, into in zip(streams, running, strict=True)]
    try:
        decoding = asyncio.gather(*(each.decodes.wait() for each in running))
        started: list[asyncio.Future[Any]] = [decoding, *tasks]
        await asyncio.wait(started, timeout=WARM_S, return_when=asyncio.FIRST_COMPLETED)
        if not decoding.done():
            failed = [task.exception() for task in tasks if task.done()]
            raise AssertionError(f"{name}: not all streams began within {WARM_S:.0f} s: {failed}")
        await ask(prompts[0])
        begun = time.monotonic()
        arriving = []
        for prompt in prompts[1:]:
            arriving.append(asyncio.ensure_future(ask(prompt)))
            await asyncio.sleep(load.every_s)
        answers = await asyncio.gather(*arriving)
        ended = time.monotonic()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await cancel(stream.key)
    gaps = np.array(
        [
            later - earlier
            for each in running
            for earlier, later in itertools.pairwise(each.arrived_s)
            if begun <= earlier and later <= ended
        ]
    )
    if not len(gaps):
        raise AssertionError(f"{name}: no stream had two tokens while prompts arrived")
    p50, p99 = np.percentile(gaps, [50, 99])
    return {
        f"{name}_gap_p50_ms": 1e3 * float(p50),
        f"{name}_gap_p99_ms": 1e3 * float(p99),
        f"{name}_gap_longest_ms": 1e3 * float(gaps.max()),
        f"{name}_stream_tokens_s": len(gaps) / (ended - begun),
        f"{name}_prompt_tokens_s": load.prompts * load.prompt_tokens / (ended - begun),
        f"{name}_prompt_ttft_ms": 1e3 * statistics.median(each.ttft_s for each in answers),
    }
