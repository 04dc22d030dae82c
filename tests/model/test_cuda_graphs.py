"""Decode graphs on a CPU, with a capture that repeats its work: buckets, filling, and the same tokens as without."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.plans import greedy
from kvtransfer.open import RESERVED_BLOCKS
from tests.model.families import write_family
from tests.model.paging import pool_for
from tests.model.tiny import write_tiny_llama
from workers.engine.step import Chunk, Draw, StepPlan
from workers.executor import cuda_graphs
from workers.executor.cuda_graphs import (
    MIN_CONTEXT,
    PAGE_BYTES,
    DecodeGraphs,
    MemoryUse,
    context_bucket,
    cuda_capture,
    graph_bytes,
    has_graphs,
    padded,
    sequences_bucket,
)
from workers.executor.inputs import step_arrays
from workers.executor.rank import ModelPart
from workers.model.decoder import Decoder
from workers.model.folder import ModelFolder
from workers.model.load import load_decoder
from workers.ops.attention import SDPA, TRITON, Attention
from workers.request import SamplingParams

GREEDY = Draw(SamplingParams(temperature=0.0), seed=0, position=1)


class Repeated:
    """Counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def test_decodes_by_graphs_give_the_same_tokens(tmp_path: Path) -> None:
    folder = ModelFolder("tiny", write_tiny_llama(tmp_path / "m", context_length=2048))
    model = load_decoder(folder, torch.device("cpu"), torch.float32, deterministic=True)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (9, 33, 20)]
    plain = greedy(ModelPart(model), pool_for(model.config, 80), prompts, 12, chunk=16, first_block=RESERVED_BLOCKS)
    pool, capture = pool_for(model.config, 80), Repeated()
    graphs = DecodeGraphs(model, pool.blocks, 32, 320, capture)
    assert greedy(ModelPart(model, graphs=graphs), pool, prompts, 12, chunk=16, first_block=RESERVED_BLOCKS) == plain
    # A bucket of one for the prompt's last chunk, which has one token, and one of four for all decodes.
    assert capture.captures == 2 and capture.replays == 12
    sizes = (32, 24, 16, 8, 4, 2, 1)
    assert graphs.buckets == [(size, 1024) for size in sizes]
    larger = DecodeGraphs(model, pool.blocks, 32, 10_000, capture)  # the model has 2,048
    ordered = [(32, 2048), *((size, 1024) for size in sizes), *((size, 2048) for size in sizes[1:])]
    assert larger.buckets == ordered


def test_a_graph_is_captured_before_it_is_needed_without_writing_kv(tmp_path: Path) -> None:
    folder = ModelFolder("tiny", write_tiny_llama(tmp_path / "m", context_length=4096))
    model = load_decoder(folder, torch.device("cpu"), torch.float32)
    pool, capture = pool_for(model.config, 8, 16), Repeated()
    graphs = DecodeGraphs(model, pool.blocks, 4, 2048, capture)
    with torch.inference_mode():
        for bucket in graphs.buckets:
            graphs.capture(*bucket)
        assert capture.captures == 6 and not pool.blocks[:-1].any()
        chunks = (Chunk("a", (7,), 20, (2, 3), GREEDY), Chunk("b", (9,), 3, (4,), GREEDY))
        by_graph = graphs.logits(step_arrays(StepPlan(1, chunks), 16))
        assert by_graph is not None and capture.captures == 6 and capture.replays == 1
        one = graphs.logits(step_arrays(StepPlan(2, (Chunk("a", (7,), 2047, (2,) * 128, GREEDY),)), 16))
        assert one is not None and capture.captures == 6
        longer = Chunk("a", (7,), 2048, (2,) * 129, GREEDY)
        assert graphs.logits(step_arrays(StepPlan(3, (longer,)), 16)) is None


class Calls:
    """Stands for `torch.cuda`: notes the calls of a capture, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[str] = []
        self._handles = itertools.count()
        self._now = "steps"
        for name in ("graph_pool_handle", "current_device", "current_stream", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", partial(_Stream, self, "side"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
        monkeypatch.setattr(cuda_graphs, "_capture_stream", cache(cuda_graphs._capture_stream.__wrapped__))

    def graph_pool_handle(self) -> int:
        return next(self._handles)

    def current_device(self) -> int:
        return 1

    def current_stream(self) -> "_Stream":
        return _Stream(self, self._now)

    @contextmanager
    def stream(self, stream: "_Stream") -> Iterator[None]:
        before, self._now = self._now, stream.name
        yield
        self._now = before

    @contextmanager
    def graph(self, graph: object, pool: int, stream: "_Stream", capture_error_mode: str) -> Iterator[None]:
        self.noted.append(f"capture of pool {pool} on {stream.name}, {capture_error_mode}")
        yield
        self.noted.append("captured")

    def work(self) -> None:
        self.noted.append(f"work on {self._now}")


class _Stream:
    def __init__(self, calls: Calls, name: str, device: int = 0) -> None:
        self._calls = calls
        self.name = f"{name} of device {device}" if device else name

    def wait_stream(self, other: "_Stream") -> None:
        self._calls.noted.append(f"{self.name} waits for {other.name}")


class _Graph:
    def replay(self) -> None: ...


def test_work_is_done_before_it_is_captured_on_one_stream_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one `Capture` shares, another does not use again: its graphs may be gone. They share the stream."""
    calls = Calls(monkeypatch)
    for capture in (measuring := cuda_capture(), measuring, cuda_capture()):
        capture(calls.work)
    side = "side of device 1"
    assert calls.noted == [
        note
        for pool in (0, 0, 1)
        for note in (
            *(f"{side} waits for steps", f"work on {side}", f"steps waits for {side}"),
            *(f"capture of pool {pool} on {side}, thread_local", "work on steps", "captured"),
        )
    ]


class CountedDevice:
    """Memory as torch and CUDA give it to graphs: a pool that all share and that keeps its blocks, first fit, and pages
    of the driver.
    """

    of_driver, of_block = 3 * PAGE_BYTES // 4, PAGE_BYTES

    def __init__(self, model: Decoder) -> None:
        self._vocab_size = model.config.vocab_size
        self._blocks: list[int] = []
        self._captures = 0
        self.others = 0

    def capture(self, work: Any) -> Callable[[], None]:
        (inputs,) = work.args
        rows = len(inputs.tokens)
        needs = [4096 * rows * self._vocab_size, 64 * rows * inputs.batch.max_context]
        for need in sorted(needs, reverse=True):
            if not any(need <= block for block in self._blocks):
                self._blocks.append(-(-need // self.of_block) * self.of_block)
        self._captures += 1
        return lambda: None

    def use(self) -> MemoryUse:
        reserved = sum(self._blocks)
        driver = -(-self._captures * self.of_driver // PAGE_BYTES) * PAGE_BYTES
        return MemoryUse(reserved, (1 << 40) - reserved - driver - self.others)


def test_the_memory_of_all_graphs_is_known_before_the_pool_is_sized(tmp_path: Path) -> None:
    """Less than a quarter above what they take then, although another process allocates meanwhile."""
    folder = ModelFolder("tiny", write_tiny_llama(tmp_path / "m", context_length=16384))
    model = load_decoder(folder, torch.device("cpu"), torch.float32)
    pool = pool_for(model.config, 4)
    measuring = CountedDevice(model)
    numbers = itertools.count()

    def use() -> MemoryUse:
        measuring.others += (1 << 35) * (next(numbers) % 4 == 2)
        return measuring.use()

    estimated = graph_bytes(lambda: DecodeGraphs(model, pool.blocks, 64, 16384, measuring.capture), use)
    real = CountedDevice(model)
    before = real.use()
    graphs = DecodeGraphs(model, pool.blocks, 64, 16384, real.capture)
    with torch.inference_mode():
        for bucket in graphs.buckets:
            graphs.capture(*bucket)
    taken = before.free - real.use().free
    assert taken <= estimated < 1.25 * taken
    # From the fewest sequences to the most, each graph would need a block of its own.
    ascending = CountedDevice(model)
    graphs = DecodeGraphs(model, pool.blocks, 64, 16384, ascending.capture)
    with torch.inference_mode():
        for bucket in sorted(graphs.buckets):
            graphs.capture(*bucket)
    assert ascending.use().reserved > 3 * real.use().reserved


@pytest.mark.parametrize(
    ("family", "attention", "expected"),
    [("llama 3", TRITON, True), ("llama 3", SDPA, False), ("mixtral", TRITON, False), ("qwen 3 next", TRITON, False)],
)
def test_what_waits_for_the_device_has_no_graphs(
    family: str, attention: Attention, expected: bool, tmp_path: Path
) -> None:
    folder = ModelFolder("tiny", write_family(tmp_path / "m", family))
    model = load_decoder(folder, torch.device("cpu"), torch.float32, attention=attention)
    assert has_graphs(model) == expected


@given(st.integers(1, 256), st.integers(1, 200_000))
def test_buckets_hold_what_they_are_for_with_little_waste(sequences: int, context: int) -> None:
    bucket = sequences_bucket(sequences)
    assert sequences <= bucket < sequences + 8 and (bucket <= 2 * sequences)
    assert context <= context_bucket(context) < max(MIN_CONTEXT + 1, 2 * context)


def test_sequences_that_fill_a_bucket_use_a_block_of_their_own() -> None:
    chunks = tuple(Chunk(str(row), (7,), 20, (5 + row, 9 + row), GREEDY) for row in range(3))
    step = padded(step_arrays(StepPlan(1, chunks), 16), 4, 1024, 99, 16)
    assert step.slots.tolist() == [9 * 16 + 4, 10 * 16 + 4, 11 * 16 + 4, 99 * 16]
    assert step.contexts.tolist() == [21, 21, 21, 1] and step.tables.shape == (4, 64)
    assert step.tables[3].tolist() == [99] * 64 and step.tables[1, :2].tolist() == [6, 10]


@pytest.mark.parametrize("chunks", [
    (Chunk("prompt", (7, 8), 0, (5,), GREEDY),),
    (Chunk("decode", (7,), 20, (5, 6), GREEDY), Chunk("prompt", (7, 8), 0, (7,), None)),
    (Chunk("middle", (7,), 0, (5,), None),),
    tuple(Chunk(str(row), (7,), 0, (5 + row,), GREEDY) for row in range(257)),
])  # fmt: skip
def test_other_steps_have_no_graph(chunks: tuple[Chunk, ...], tmp_path: Path) -> None:
    model = load_decoder(ModelFolder("tiny", write_tiny_llama(tmp_path / "m")), torch.device("cpu"), torch.float32)
    graphs = DecodeGraphs(model, pool_for(model.config, 4).blocks, 256, 64, Repeated())
    assert graphs.logits(step_arrays(StepPlan(1, chunks), 16)) is None
