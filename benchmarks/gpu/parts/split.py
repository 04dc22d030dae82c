"""Prefill and decode in two processes on one device give the tokens of one worker; how KV moves, and how long it takes.

The workers, their RPC and their transports are the product's. With `deterministic` every token must be equal; without
it, the part counts those that are.
"""

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.llama import TINY
from benchmarks.gpu.model_folder import LLAMA_1B, write_model
from benchmarks.gpu.served import SHARED_MEMORY, Caller, TimedTokens, served
from workers.config import EngineConfig, TransferConfig, WorkerConfig
from workers.request import Request, SamplingParams

NEW = 48
LENGTHS, SHARED = (5, 16, 100, 333, 700, 1500, 2049), 320  # tokens; of the first half of longer prompts
TIMED_TOKENS, TIMED = 2048, 5


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a token differs with `deterministic`, if KV moves over sockets on a GPU, or if memory leaks."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        shape, dtype = (TINY, torch.float32) if tiny else (LLAMA_1B, torch.bfloat16)
        model = write_model(Path(folder) / "model", shape, device, dtype, 512 if tiny else 8192)
        return asyncio.run(_measured(model, device, dtype, tiny=tiny))


async def _measured(model: Path, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> dict[str, object]:
    on_gpu = device.type == "cuda"
    engine = EngineConfig(
        kv_blocks=0 if on_gpu else 256,
        max_batch_tokens=512 if on_gpu else 64,
        device=str(device),
        threads=1,
    )
    configs = [
        WorkerConfig(f"{role}-{kind}", role, str(model), replace(engine, deterministic=kind == "deterministic"))
        for kind in ("deterministic", "fast")
        for role in ("prefill", "decode")
    ]
    transfer = TransferConfig(backends=("cuda_ipc", "tcp") if on_gpu else ("nixl", "tcp"))
    configs = [replace(each, transfer=transfer, memory_part=1 / len(configs)) for each in configs]  # of one device
    requests = _requests(TINY.vocab if tiny else LLAMA_1B.vocab, 10 if tiny else 1)
    left: dict[str, int] = {}
    async with served(configs, left) as workers:
        async with Caller(*workers[:2]) as caller:
            exact = await _compared(caller, requests, on_gpu=on_gpu)
        if exact.equal_tokens != exact.tokens:
            raise AssertionError(f"deterministic: {exact.tokens - exact.equal_tokens} of {exact.tokens} tokens differ")
        async with Caller(*workers[2:]) as caller:
            fast = await _compared(caller, requests, on_gpu=on_gpu)
            times = await _times(caller, requests[0], 100 if tiny else TIMED_TOKENS)
    figures: dict[str, object] = {
        "open_s": max(each.opened.seconds for each in workers),
        "kv_path": exact.path,
        "kv_dtype": workers[0].opened.dtype,
        "kv_tokens_of_each_worker": workers[0].opened.kv_tokens,
        "requests": len(requests),
        "equal_tokens_deterministic": exact.equal_tokens,
        "equal_share_otherwise": fast.equal_tokens / fast.tokens,
        "kv_moved_mb": exact.num_bytes / 1e6,
        "digests_compared": exact.digests,
        **times,
    }
    if any(left.values()):
        raise AssertionError(f"closed workers hold bytes of the device: {left}; otherwise all is well: {figures}")
    return figures


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of requests, split and on one worker, and how their KV moved."""

    tokens: int
    equal_tokens: int
    path: str
    num_bytes: int
    digests: int


async def _compared(caller: Caller, requests: Sequence[Request], *, on_gpu: bool) -> Compared:
    """All at once, first split, then on the decode worker alone, whose cache the first run did not fill."""
    prefill, decode = caller.workers
    split = await asyncio.gather(*(caller.split(_of("split", each), prefill, decode) for each in requests))
    alone = await asyncio.gather(*(caller.alone(_of("alone", each), decode) for each in requests))
    for worker in (prefill, decode):
        await worker.stub.check()
    reports = [each.report for each in split if each.report is not None]
    if len(reports) < len(split):
        raise AssertionError(f"only {len(reports)} of {len(split)} prompts moved")
    if on_gpu and any(each.transport == "tcp" for each in reports):
        raise AssertionError("KV of a GPU moved over sockets")
    pairs = [pair for one, other in zip(split, alone, strict=True) for pair in _pairs(one, other)]
    return Compared(
        len(pairs),
        sum(one == other for one, other in pairs),
        "; ".join(sorted({f"{each.transport}: {each.path}" for each in reports})),
        sum(each.num_bytes for each in reports),
        sum(each.digests_verified for each in reports),
    )


def _of(run: str, request: Request) -> Request:
    """Of a tenant of its own: cached KV is not shared between runs."""
    return replace(request, tenant=run, origin=run)


def _pairs(one: TimedTokens, other: TimedTokens) -> list[tuple[int, int]]:
    if not len(one.tokens) == len(other.tokens) == NEW:
        raise AssertionError(f"{len(one.tokens)} and {len(other.tokens)} tokens instead of {NEW}")
    return list(zip(one.tokens, other.tokens, strict=True))


def _requests(vocab: int, part: int) -> list[Request]:
    """Two of each length, one greedy and one that samples; the longer prompts begin alike. Lengths are over `part`."""
    rng = random.Random(0)
    common = [rng.randrange(3, vocab) for _ in range(SHARED // part)]
    requests = []
    for length in LENGTHS:
        for temperature in (0.0, 0.8):
            prompt = [rng.randrange(3, vocab) for _ in range(max(1, length // part))]
            if len(prompt) > len(common):
                prompt[: len(common)] = common
            sampling = SamplingParams(temperature, seed=length, max_tokens=NEW, ignore_eos=True)
            requests.append(Request(f"{length} at {temperature}", tuple(prompt), sampling))
    return requests


async def _times(caller: Caller, like: Request, length: int) -> dict[str, object]:
    """Medians of single requests with new prompts, split and on one worker in turn."""
    prefill, decode = caller.workers
    rng = random.Random(1)
    answers: dict[str, list[TimedTokens]] = {"split": [], "alone": []}
    for number in range(TIMED + 1):
        prompt = tuple(rng.randrange(3, max(like.prompt)) for _ in range(length))
        request = replace(like, id=f"timed {number}", prompt=prompt)
        answers["split"].append(await caller.split(_of("split", request), prefill, decode))
        answers["alone"].append(await caller.alone(_of("alone", request), decode))
    figures: dict[str, object] = {"timed_prompt_tokens": length}
    for name, found in answers.items():
        timed = found[1:]  # the first warms up
        later = [statistics.median(each.gaps_s[1:]) for each in timed]
        figures[f"{name}_ttft_ms"] = 1e3 * statistics.median(each.ttft_s for each in timed)
        figures[f"{name}_second_token_ms"] = 1e3 * statistics.median(each.gaps_s[0] for each in timed)
        figures[f"{name}_later_tokens_ms"] = 1e3 * statistics.median(later)
    moved = [each.report for each in answers["split"][1:] if each.report is not None]
    figures["transfer_ms"] = 1e3 * statistics.median(each.busy_s for each in moved)
    figures["transfer_mb"] = statistics.median(each.num_bytes for each in moved) / 1e6
    return figures
