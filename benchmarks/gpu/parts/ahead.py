"""Decodes of an engine, with the next step waiting behind the one in flight and without: the same tokens."""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.gpu.llama import TINY
from benchmarks.gpu.model_folder import LLAMA_1B, write_model
from benchmarks.gpu.served import ANSWER_S, SHARED_MEMORY
from kvtransfer.open import RESERVED_BLOCKS
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.engine.engine import Engine, EngineOutput
from workers.engine.engine_loop import EngineLoop
from workers.executor.rank import Rank
from workers.executor.rank_loader import open_solo
from workers.model.folder import ModelFolder
from workers.request import Request, SamplingParams, TokensOut

ROUNDS = 3
PROMPT = 64


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Milliseconds a step by the number of streams, both ways in turns."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        shape, dtype = (TINY, torch.float32) if tiny else (LLAMA_1B, torch.bfloat16)
        model = write_model(Path(folder) / "model", shape, device, dtype, 4096)
        return asyncio.run(_measured(model, device, str(dtype).removeprefix("torch."), tiny=tiny))


async def _measured(model: Path, device: torch.device, dtype: str, *, tiny: bool) -> dict[str, object]:
    streams, answer = ((1, 4), 24) if tiny else ((1, 64, 256), 256)
    blocks = max(streams) * -(-(PROMPT + answer) // 16) + 64
    sizes = EngineConfig(
        kv_blocks=blocks, max_running=max(streams), max_waiting=max(streams), device=str(device), dtype=dtype, threads=1
    )
    transfer = TransferConfig(("cuda_ipc",) if device.type == "cuda" else ("tcp",), host="127.0.0.1")
    config = WorkerConfig("ahead", "ahead", str(model), sizes, transfer=transfer, secret="of this part")
    executor = await open_solo(config, ModelFolder("ahead", model), "ahead-1")
    figures: dict[str, object] = {}
    try:
        for count in streams:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            answers = []
            for ahead in (False, True) * ROUNDS:
                executor.runs_ahead = ahead
                tokens, step_s = await _decodes(executor, sizes, count, answer)
                answers.append(tokens)
                seconds[ahead].append(step_s)
            if any(each != answers[0] for each in answers):
                raise AssertionError(f"{count} streams: other tokens with steps ahead than without")
            figures[f"step_{count}_ms"] = 1e3 * statistics.median(seconds[False])
            figures[f"step_{count}_ahead_ms"] = 1e3 * statistics.median(seconds[True])
    finally:
        await executor.close()
    return figures


async def _decodes(
    executor: Rank, sizes: EngineConfig, streams: int, answer: int
) -> tuple[dict[str, list[int]], float]:
    """The streams' tokens, and seconds a step while all of them decode."""
    facts, clock = executor.facts, asyncio.get_running_loop().time
    engine = Engine(sizes, facts, reserved=RESERVED_BLOCKS)
    tokens: dict[str, list[int]] = defaultdict(list)
    arrived_s: list[float] = []  # of the first stream's tokens

    left, ended = streams, asyncio.Event()

    def deliver(outputs: list[EngineOutput]) -> None:
        nonlocal left
        for each in outputs:
            if not isinstance(each, TokensOut):
                raise AssertionError(f"{each} instead of tokens")
            tokens[each.key] += each.tokens
            if each.key == "stream-0/0":
                arrived_s.append(time.monotonic())
            left -= each.finish is not None
        if not left:
            ended.set()

    for index in range(streams):
        sampling = SamplingParams(temperature=0.8, seed=index, max_tokens=answer, ignore_eos=True)
        prompt = tuple((7 * index + each) % (facts.vocab_size - 3) + 3 for each in range(PROMPT))
        engine.add(Request(f"stream-{index}", prompt, sampling, reply_to="ahead"), clock(), hold=False)
    engine_loop = EngineLoop(engine, executor, deliver, clock)
    running = asyncio.ensure_future(engine_loop.run())
    async with asyncio.timeout(ANSWER_S):
        await asyncio.wait([running, asyncio.ensure_future(ended.wait())], return_when=asyncio.FIRST_COMPLETED)
        engine_loop.stop()
        await running
    steps_s = [later - earlier for earlier, later in itertools.pairwise(arrived_s[answer // 4 :])]
    return dict(tokens), statistics.median(steps_s)
