"""A real (small, random) model whose prefixes went to host memory and came back: no token changes."""

import asyncio
import os
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KVLayout
from kvtransfer.open import RESERVED_BLOCKS, SharedMemory
from workers.config import ByteSize, CacheConfig, EngineConfig, TransferConfig, WorkerConfig
from workers.costs import LinearCost
from workers.engine.engine import Engine
from workers.engine.step import StepPlan, StepResult
from workers.errors import ModelError
from workers.executor.kv_pool import _host_memory, allocate_pool
from workers.executor.rank_loader import open_solo
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.kv_layers import kv_layout
from workers.ops.completion import wait
from workers.request import Request, SamplingParams, TokensOut

PROMPTS = [tuple(range(5 + 40 * index, 5 + 40 * index + length)) for index, length in enumerate((21, 30, 40, 33, 26))]
ROUNDS = 3
DEVICE = torch.device(os.environ.get("DIPTYCH_TEST_DEVICE", "cpu"))


async def answers(
    model: ModelFolder, depth: int = 1, host: int = 0, dtype: str = "float32", pinned: int = 0, **engine: object
) -> tuple[list[list[int]], int, int]:
    """Every prompt in turn, and all again: the tokens of each, and blocks that went to the host and came back.

    `host`: blocks of the host cache, in which the first `pinned` prompts are pinned.
    """
    sizes = {"block_size": 8, "kv_blocks": 14, "max_batch_tokens": 32, "threads": 1, "dtype": dtype}
    made = EngineConfig(**{**sizes, **engine})  # type: ignore[arg-type]
    cache = CacheConfig(ByteSize(host * kv_layout(read_model_config(model.path), "", 8, dtype).block_bytes))
    config = WorkerConfig("w", "pool", model.name, made, transfer=TransferConfig(backends=("memory",)), cache=cache)
    executor = await open_solo(config, model, "w-1", SharedMemory())
    facts = executor.facts
    subject = Engine(
        made,
        facts,
        reserved=RESERVED_BLOCKS,
        cost=LinearCost(swap_byte_s=0.0),
        depth=depth,
        max_pinned=host // 2,
    )
    for number in range(pinned):
        subject.pin(Request(str(number), PROMPTS[number]), 60.0, 0.0)
    assert facts.host_cache_blocks == host
    tokens: list[list[int]] = []
    saved = restored = 0
    for number in range(ROUNDS * len(PROMPTS)):
        sampling = SamplingParams(temperature=float(number % 2), seed=number, max_tokens=6, ignore_eos=True)
        subject.add(Request(str(number), PROMPTS[number % len(PROMPTS)], sampling, reply_to="t"), 0.0, hold=False)
        tokens.append([])
        in_flight: deque[tuple[StepPlan, asyncio.Task[StepResult]]] = deque()
        while True:
            while len(in_flight) < depth and (plan := subject.schedule(0.0)) is not None:
                in_flight.append((plan, asyncio.ensure_future(executor.execute(plan))))
                saved += len(plan.swap_out)
                restored += len(plan.swap_in)
            if not in_flight:
                break
            plan, task = in_flight.popleft()
            subject.commit(plan, await task, 0.0)
            subject.check()
            for output in subject.drain():
                assert isinstance(output, TokensOut)
                tokens[-1] += output.tokens
    await executor.close()
    most = sum(len(prompt) // 8 for prompt in PROMPTS[:pinned])
    assert sum(tier.pinned_blocks for tier in subject.stats().tiers) == most
    return tokens, saved, restored


@pytest.mark.grid(keep=5)
@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("fp8", marks=pytest.mark.full)])
@pytest.mark.parametrize("depth", [1, 3])
async def test_prefixes_from_the_host_give_the_tokens_of_computed_ones(
    small: ModelFolder, depth: int, dtype: str
) -> None:
    expected, _, _ = await answers(small, prefix_caching=False, dtype=dtype)
    found, saved, restored = await answers(small, depth, host=40, dtype=dtype)
    assert found == expected
    assert saved > 10 and restored > 10


async def test_pinned_prefixes_give_the_tokens_of_computed_ones(small: ModelFolder) -> None:
    """Host memory has room for two of the five prompts, and keeps the first. Without the pin, nothing comes back."""
    steps: dict[str, Any] = {"max_batch_tokens": 8, "max_running": 4}  # these save few blocks ahead
    expected, _, _ = await answers(small, prefix_caching=False, **steps)
    for pinned, least in ((0, 0), (1, 2 * (ROUNDS - 1))):
        found, _, restored = await answers(small, host=8, pinned=pinned, **steps)
        assert found == expected and restored == least


@given(st.randoms(use_true_random=False), st.sampled_from(["float32", "int8", "fp8"]))
def test_every_block_of_a_plan_moves_to_its_place(draw: random.Random, dtype: str) -> None:
    """Adjacent blocks move in one copy; no pair may get lost at the borders."""
    pool = allocate_pool(KVLayout("m", 1, 1, 4, 2, dtype), 12, DEVICE, 12)
    for memory in (pool.blocks, pool.host):
        memory.view(torch.uint8).random_(0, 256)
    blocks, host = ([*range(12)] if draw.random() < 0.5 else draw.sample(range(12), 12) for _ in range(2))
    split = sorted(draw.choices(range(9), k=2))
    swap_out = tuple(zip(blocks[: split[0]], host, strict=False))
    swap_in = tuple((host[index], blocks[index]) for index in range(split[0], split[1]))
    copies = ((blocks[-1], blocks[-2]), (blocks[-1], blocks[-3]))
    expected_blocks, expected_host = pool.blocks.cpu().clone(), pool.host.clone()
    for block, saved in swap_out:
        expected_host[saved] = pool.blocks[block].cpu()
    for saved, block in swap_in:
        expected_blocks[block] = pool.host[saved]
    for source, target in copies:
        expected_blocks[target] = pool.blocks[source].cpu()
    pool.move(StepPlan(0, (), swap_out=swap_out, swap_in=swap_in, copies=copies))
    wait(pool.record_event())
    assert torch.equal(pool.blocks.cpu().view(torch.uint8), expected_blocks.view(torch.uint8))
    assert torch.equal(pool.host.view(torch.uint8), expected_host.view(torch.uint8))


class FakeDriver:
    """CUDA's calls that pin memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
        self.pinned: dict[int, int] = {}
        self._limit_bytes = limit_bytes
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "check_error", self._check)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.pinned[address] = num_bytes
        return int(num_bytes > self._limit_bytes)

    def cudaHostUnregister(self, address: int) -> None:
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(first, 16) <= address < int(end, 16) for first, end in ranges), "other memory may be there now"
        del self.pinned[address]

    def _check(self, result: int) -> None:
        if result:
            raise RuntimeError("out of memory")


def test_memory_beside_a_gpu_is_pinned_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout("m", 1, 1, 4, 3, "int8")
    driver = FakeDriver(monkeypatch, 1 << 20)
    host = _host_memory(layout, 5, torch.device("cuda"))
    assert host.shape == (5, *layout.shape) and not host.any()
    assert list(driver.pinned.values()) == [5 * layout.block_bytes], "not rounded up"
    block = host[3]
    del host
    assert driver.pinned
    del block
    assert not driver.pinned


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch, 100)
    with pytest.raises(ModelError, match=r"0\.0 GiB of host memory cannot be pinned for cuda; lower cache\.host"):
        _host_memory(KVLayout("m", 1, 1, 4, 3, "int8"), 5, torch.device("cuda"))
    assert len(driver.pinned) == 1, "it was tried"
