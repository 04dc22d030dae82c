"""A sequence whose leading KV lies in other executors' pools: every bit as if all of it were here."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import LeaseLost, TransferError
from kvtransfer.open import SharedMemory
from tests.model.families import write_family
from tests.model.test_executor import config
from tests.model.test_shard import SMOLLM2
from tests.model.tiny import write_tiny_llama
from workers.config import ParallelConfig
from workers.engine.executor import SpanQuery
from workers.engine.step import ELSEWHERE, Chunk, Draw, RemoteKV, StepPlan, StepResult
from workers.executor import remote_kv
from workers.executor.rank import Rank
from workers.executor.rank_loader import open_solo
from workers.executor.remote_kv import RemoteStates, by_heads
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.shard import shard_of
from workers.ops.batch import SPAN
from workers.ops.native.library import library
from workers.request import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

LAYERS, BLOCK = 3, 8
PER_SPAN = SPAN // BLOCK
PARAMS = SamplingParams(temperature=0, logprobs=20)
PROMPT = tuple(10 + number * 37 % 300 for number in range(2 * SPAN + 41))
NEIGHBOR = tuple(range(40, 60))
BLOCKS = tuple(range(2, 2 + -(-(len(PROMPT) + 8) // BLOCK)))  # of the prompt
BESIDE = (100, 101, 102, 103)  # of the neighbor
SPARE = 110
LENT = {"first": tuple(range(90, 90 - PER_SPAN, -1)), "second": tuple(range(30, 30 + PER_SPAN))}
ALL = (0, 4)  # heads
Ask = Callable[[RemoteKV, SpanQuery], Awaitable[bytes]]


@pytest.fixture(scope="module", params=["llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    sizes: dict[str, Any]
    if request.param == "gpt oss":
        sizes = {"head_dim": 8, "sliding_window": 400, "max_position_embeddings": 512}  # a window over all spans
        return ModelFolder("deep", write_family(tmp_path_factory.mktemp("models") / "deep", "gpt oss", **sizes))
    if request.param == "llama 4":
        sizes = {"head_dim": 8, "num_hidden_layers": LAYERS, "max_position_embeddings": 512, "moe_layers": [2]}
        sizes |= {"attention_chunk_size": SPAN + 70, "no_rope_layers": [1, 0, 1]}  # a chunk begins in the second span
        return ModelFolder("deep", write_family(tmp_path_factory.mktemp("models") / "deep", "llama 4", **sizes))
    if request.param == "deepseek 3":
        sizes = {"max_position_embeddings": 512, "rope_parameters": None}
        return ModelFolder("deep", write_family(tmp_path_factory.mktemp("models") / "deep", "deepseek 3", **sizes))
    return ModelFolder("deep", write_tiny_llama(tmp_path_factory.mktemp("models") / "deep", num_layers=LAYERS))


class Workers:
    """`whole` has all KV; `here` has the prompt's KV from the third span on, the lenders one span each."""

    def __init__(self, whole: Rank, here: Rank, lenders: dict[str, Rank]) -> None:
        self.whole, self.here, self.lenders = whole, here, lenders
        self.asked: list[tuple[str, SpanQuery]] = []
        here.borrow(self._attend)
        self.answer: Ask = self.attend

    async def _attend(self, span: RemoteKV, query: SpanQuery) -> bytes:
        self.asked.append((span.lender, query))
        return await self.answer(span, query)

    async def attend(self, span: RemoteKV, query: SpanQuery) -> bytes:
        return await self.lenders[span.lender].attend(LENT[span.lender], query)

    async def compute(self, *steps: tuple[Chunk, ...]) -> tuple[list[StepResult], list[StepResult]]:
        """The results of `whole` and of `here`, where the spans are elsewhere; they digest each chunk's last block."""
        results: tuple[list[StepResult], list[StepResult]] = ([], [])
        for number, chunks in enumerate(steps):
            ends = tuple((each.blocks[-1], each.context - (len(each.blocks) - 1) * BLOCK) for each in chunks)
            results[0].append(await self.whole.execute(StepPlan(number, chunks, ends)))
            results[1].append(await self.here.execute(StepPlan(number, tuple(map(borrowed, chunks)), ends)))
        return results


def borrowed(chunk: Chunk) -> Chunk:
    """The chunk with its two leading spans on lenders; the neighbor's stays as it is."""
    if chunk.key != "long/0":
        return chunk
    remote = tuple(RemoteKV(name, 7, PER_SPAN) for name in LENT)
    blocks = (ELSEWHERE,) * (2 * PER_SPAN) + chunk.blocks[2 * PER_SPAN :]
    return Chunk(chunk.key, chunk.tokens, chunk.first_position, blocks, chunk.draw, remote=remote)


def chunk(tokens: tuple[int, ...], first: int, *, draws: bool = True, key: str = "long/0") -> Chunk:
    context = first + len(tokens)
    blocks = (BLOCKS if key == "long/0" else BESIDE)[: -(-context // BLOCK)]
    return Chunk(key, tokens, first, blocks, Draw(PARAMS, 0, context) if draws else None)


def beside() -> Chunk:
    return chunk(NEIGHBOR, 0, key="neighbor/0")


@pytest.fixture
async def workers(folder: ModelFolder) -> AsyncIterator[Workers]:
    shared = SharedMemory()

    async def opened(name: str) -> Rank:
        return await open_solo(config(name, block_size=BLOCK, kv_blocks=112), folder, f"{name}-1", shared)

    whole, here = await opened("whole"), await opened("here")
    lenders = {name: await opened(name) for name in LENT}
    await whole.execute(StepPlan(0, (chunk(PROMPT[: 2 * SPAN], 0, draws=False),)))
    here._pool.blocks.fill_(torch.nan)
    for index, (name, blocks) in enumerate(LENT.items()):
        span = list(BLOCKS[index * PER_SPAN : (index + 1) * PER_SPAN])
        lenders[name]._pool.blocks[list(blocks)] = whole._pool.blocks[span]
    for executor in (whole, here):
        executor._pool.blocks[list(BLOCKS[2 * PER_SPAN :] + BESIDE + (SPARE,))] = 0
    yield Workers(whole, here, lenders)
    for executor in (whole, here, *lenders.values()):
        await executor.close()


def same(one: list[StepResult], other: list[StepResult]) -> bool:
    parts = [[(each.tokens, each.logprobs, each.digests) for each in results] for results in (one, other)]
    return parts[0] == parts[1]


@pytest.mark.parametrize("folder", ["llama", "gpt oss", "deepseek 3"], indirect=True)
async def test_chunks_of_a_prompt_and_decodes_have_the_same_bits_as_with_all_kv_here(workers: Workers) -> None:
    tail = PROMPT[2 * SPAN :]
    results = await workers.compute(
        (chunk(tail[:17], 2 * SPAN, draws=False), beside()), (chunk(tail[17:], 2 * SPAN + 17), beside())
    )
    assert same(*results) and not results[1][-1].lost
    tokens = [results[0][-1].tokens[0]]
    for position in range(len(PROMPT), len(PROMPT) + 4):
        assert tokens[-1] is not None
        results = await workers.compute((chunk((tokens[-1],), position), beside()))
        assert same(*results)
        tokens.append(results[1][0].tokens[0])
    assert None not in tokens
    layers = [(name, query.layer) for name, query in workers.asked]
    assert layers == [(name, layer) for _ in range(6) for layer in range(LAYERS) for name in LENT]


@pytest.mark.parametrize("folder", ["llama 4"], indirect=True)
async def test_layers_with_chunked_attention_ask_only_lenders_that_hold_the_chunk(workers: Workers) -> None:
    tail = PROMPT[2 * SPAN :]
    results = await workers.compute((chunk(tail, 2 * SPAN), beside()))
    assert same(*results) and not results[1][-1].lost
    assert [(name, query.layer) for name, query in workers.asked] == [
        ("second", 0), ("first", 1), ("second", 1), ("second", 2)
    ]  # fmt: skip
    token = results[0][0].tokens[0]
    assert token is not None
    assert same(*await workers.compute((chunk((token,), len(PROMPT)), beside())))


async def test_queries_that_are_too_large_for_a_call_take_several(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_kv, "MAX_QUERY_BYTES", 7 * 4 * 8 * 4)  # of 7 tokens
    results = await workers.compute((chunk(PROMPT[2 * SPAN :], 2 * SPAN),))
    assert same(*results) and len(workers.asked) == 2 * 6 * LAYERS
    assert {query.position for _, query in workers.asked} == {2 * SPAN + first for first in range(0, 41, 7)}


def raises(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    "answer",
    [lambda state: raises(LeaseLost("the loan has ended")), lambda state: state[4:], lambda state: b""],
    ids=["refused", "short", "empty"],
)
async def test_a_lender_that_fails_in_a_layer_loses_its_chunk_alone(
    workers: Workers, layer: int, answer: Callable[[bytes], bytes]
) -> None:
    async def attend(span: RemoteKV, query: SpanQuery) -> bytes:
        state = await workers.attend(span, query)
        return answer(state) if (span.lender, query.layer) == ("second", layer) else state

    workers.answer = attend
    local = chunk(PROMPT[2 * SPAN :], 2 * SPAN)
    (whole,), (here,) = await workers.compute((local, beside()))
    assert here.lost == (0,) and here.tokens[0] is None and here.logprobs[0] is None
    assert here.tokens[1] is not None and (here.tokens[1], here.logprobs[1]) == (whole.tokens[1], whole.logprobs[1])
    assert here.digests[0][1] == whole.digests[0][1]
    assert [query.layer for name, query in workers.asked if name == "second"] == list(range(layer + 1))
    workers.answer = workers.attend
    again = await workers.compute((local, beside()))
    assert same(*again) and not again[1][0].lost


@pytest.mark.parametrize("limit", ["REMOTE_TIMEOUT_S", "STEP_WAIT_S"])
async def test_a_lender_that_never_answers_loses_its_chunk_at_the_deadline(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Of a layer, and of all layers of a step together."""
    ended = asyncio.Event()

    async def attend(span: RemoteKV, query: SpanQuery) -> bytes:
        if len(query.query) == 2 * 4 * 8 * 4:  # of two tokens; the decode is answered
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return await workers.attend(span, query)

    for name in ("REMOTE_TIMEOUT_S", "STEP_WAIT_S"):
        monkeypatch.setattr(remote_kv, name, 3.0 if name == limit else 1e6)
    await workers.compute((chunk(PROMPT[2 * SPAN :], 2 * SPAN),))
    workers.answer = attend
    unanswered = Chunk("long/0", (5, 6), 2 * SPAN, (*BLOCKS[: 2 * PER_SPAN], SPARE), Draw(PARAMS, 0, 2 * SPAN + 2))
    (whole,), (here,) = await workers.compute((chunk((5,), len(PROMPT)), beside(), unanswered))
    assert 2 in here.lost and here.tokens[2] is None
    await asyncio.wait_for(ended.wait(), 5)  # the call was cancelled
    assert here.tokens[1] == whole.tokens[1] and here.logprobs[1] == whole.logprobs[1]
    if limit == "REMOTE_TIMEOUT_S":
        assert here.lost == (2,) and here.tokens[0] == whole.tokens[0] and here.logprobs[0] == whole.logprobs[0]


@pytest.mark.parametrize("most", [0, remote_kv.MAX_AT_ONCE], ids=["thread", "at once"])
async def test_a_lender_answers_during_its_own_steps(
    workers: Workers, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_kv, "MAX_AT_ONCE", most)
    release = threading.Event()
    steps = [asyncio.ensure_future(each._thread.run(release.wait)) for each in workers.lenders.values()]
    try:
        assert same(*await workers.compute((chunk(PROMPT[2 * SPAN :], 2 * SPAN),)))
    finally:
        release.set()
        await asyncio.gather(*steps)


async def test_an_error_of_ours_fails_the_step(workers: Workers) -> None:
    async def attend(span: RemoteKV, query: SpanQuery) -> bytes:
        raise KeyError("a mistake")

    workers.answer = attend
    with pytest.raises(KeyError, match="a mistake"):
        await workers.here.execute(StepPlan(1, (borrowed(chunk(PROMPT[2 * SPAN :], 2 * SPAN)),)))


async def test_queries_that_do_not_fit_the_model_are_refused(workers: Workers) -> None:
    lender, token = workers.lenders["first"], bytes(4 * 4 * 8)
    for query in (
        SpanQuery(LAYERS, ALL, 0, SPAN, token),
        SpanQuery(0, (0, 5), 0, SPAN, bytes(5 * 4 * 8)),
        SpanQuery(0, (2, 2), 0, SPAN, token),
        SpanQuery(0, ALL, 0, SPAN, token[4:]),
        SpanQuery(0, ALL, 0, SPAN, b""),
        SpanQuery(0, ALL, 0, SPAN, token, token),
        SpanQuery(0, ALL, 0, SPAN - 1, token),
    ):
        with pytest.raises(TransferError):
            await lender.attend(LENT["first"], query)
    with pytest.raises(TransferError, match=f"not a multiple of {SPAN}"):
        await lender.attend(LENT["first"][1:], SpanQuery(0, ALL, 0, SPAN, token))


async def test_spans_that_no_window_reaches_are_not_asked_for(folder: ModelFolder) -> None:
    model = read_model_config(folder.path)
    layers = [dataclasses.replace(model.layers[0], window=window) for window in (0, 10, 9 + SPAN, 10 + SPAN)]
    asked: list[tuple[int, str]] = []

    async def attend(span: RemoteKV, query: SpanQuery) -> bytes:
        asked.append((query.layer, span.lender))
        return bytes(len(query.query) // 8 * 10)

    plan = StepPlan(1, (borrowed(chunk((1, 2), 2 * SPAN + 9)),))
    shard = shard_of(model, ParallelConfig(), 0)
    states = RemoteStates(plan, dataclasses.replace(model, layers=tuple(layers)), shard, BLOCK, attend)
    for layer in range(len(layers)):
        answer = await asyncio.to_thread(states(layer, torch.zeros(2, 4, 8)))
        neutral = answer[..., 0].eq(-torch.inf).all() and answer[..., 1:].eq(0).all()
        assert bool(neutral) == (layer == 1)
    both = [(0, "first"), (0, "second")]
    assert asked == [*both, (2, "second"), (3, "second")] and not states.lost


@settings(deadline=None)
@given(data=st.data())
def test_any_heads_find_the_ranks_that_hold_them(data: st.DataObject) -> None:
    kv_heads, group, tokens = (data.draw(st.integers(1, most)) for most in (6, 4, 3))
    model = dataclasses.replace(SMOLLM2, num_kv_heads=kv_heads, num_heads=kv_heads * group)
    parallel = ParallelConfig(data.draw(st.integers(1, model.num_heads)), data.draw(st.integers(1, 4)))
    shards = [shard_of(model, parallel, rank) for rank in range(parallel.world_size)]
    first = data.draw(st.integers(0, model.num_heads - 1))
    heads, layer = (first, data.draw(st.integers(first + 1, model.num_heads))), data.draw(st.integers(0, 29))
    query, state = (
        np.random.default_rng(3).random((tokens, heads[1] - first, width), np.float32) for width in (64, 66)
    )

    async def attend(rank: int, part: SpanQuery) -> bytes:
        shard, here = shards[rank], slice(part.heads[0] - first, part.heads[1] - first)
        assert shard.layers[0] <= part.layer < shard.layers[1]
        assert shard.heads[0] <= part.heads[0] < part.heads[1] <= shard.heads[1]
        assert part.query == query[:, here].tobytes() and part.state == state[:, here].tobytes()
        return (state[:, here] + 1).tobytes()

    asked = SpanQuery(layer, heads, 0, SPAN, query.tobytes(), state.tobytes())
    answer = asyncio.run(by_heads(asked, shards, 64, attend))
    assert answer == (state + 1).tobytes()
