"""Leading keys in another pool: their state, and attention from it, equal attention with all keys here."""

import ctypes
import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model.paging import ragged, scattered_tables
from workers.ops.attention import NATIVE, REFERENCE, SDPA, Attention
from workers.ops.batch import SPAN, KeySpan, Scoring
from workers.ops.narrow import to_slots
from workers.ops.native.library import library

BLOCKS, BLOCK_SIZE = 160, 16
PER_SPAN = SPAN // BLOCK_SIZE
native = pytest.param(NATIVE, marks=pytest.mark.skipif(library() is None, reason="no native kernels here"))


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences with some leading spans elsewhere; `lenders` says how many of them each lender holds."""

    lenders: list[list[int]]
    queries: list[int]
    contexts: list[int]
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    window: int
    softcap: float
    threads: int
    seed: int
    sinks: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lenders = draw(st.lists(st.lists(st.integers(1, 2), max_size=2), min_size=1, max_size=3))
    own = [draw(st.integers(1, 150)) for _ in lenders]
    decodes = draw(st.integers(0, len(lenders)))
    return Case(
        lenders=lenders,
        queries=[1 if row < decodes else draw(st.integers(1, length)) for row, length in enumerate(own)],
        contexts=[SPAN * sum(spans) + length for spans, length in zip(lenders, own, strict=True)],
        kv_heads=draw(st.sampled_from([1, 3])),
        group=draw(st.sampled_from([1, 3, 7])),
        head_dim=draw(st.sampled_from([8, 40, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])),
        window=draw(st.sampled_from([0, 0, 7, 100, 200, 300, -7, -100, -300])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        threads=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 2**16)),
        sinks=draw(st.booleans()),
    )


def both_ways(backend: Attention, case: Case) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Attention with the leading spans elsewhere; with all keys here; and the reference's."""
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    layer, scale = 1, case.head_dim**-0.5
    vectors = torch.randn(BLOCKS, case.kv_heads, 2, 2, BLOCK_SIZE, case.head_dim, generator=generator)
    here, nothing = to_slots(vectors, case.dtype), to_slots(torch.full((case.head_dim,), torch.nan), case.dtype)
    query = torch.randn(sum(case.queries), case.kv_heads * case.group, case.head_dim, generator=generator)
    tables = scattered_tables(case.contexts, BLOCKS, BLOCK_SIZE, rng)
    batch = ragged(tables, case.queries, case.contexts, BLOCK_SIZE)
    sinks = torch.randn(query.shape[1], generator=generator).mul(8) if case.sinks else None
    scoring = Scoring(scale, case.window, case.softcap, sinks)
    all_here = backend.attend(query, here, layer, batch, scoring)

    there, ours = nothing.expand_as(here).clone(), here.clone()
    moved = rng.sample(range(BLOCKS), BLOCKS)  # block here -> block there
    states = torch.full((*query.shape[:2], case.head_dim + 2), torch.nan)  # of sequences without spans: never read
    start = 0
    for row, spans in enumerate(case.lenders):
        rows, position, first = slice(start, start + case.queries[row]), case.contexts[row] - case.queries[row], 0
        start, state = rows.stop, None
        for num_spans in spans:
            blocks = tables[row][first // BLOCK_SIZE : first // BLOCK_SIZE + num_spans * PER_SPAN]
            lent = [moved[block] for block in blocks]
            there[lent] = here[blocks]
            ours[blocks] = nothing
            span = KeySpan(torch.tensor(lent, dtype=torch.int32), num_spans * SPAN, position - first, state, first)
            state = backend.attend_span(query[rows], there, layer, span, scoring)
            first += num_spans * SPAN
        if state is not None:
            states[rows] = state
        tables[row][: first // BLOCK_SIZE] = [-1] * (first // BLOCK_SIZE)

    def arrive() -> Tensor:
        ours.copy_(nothing.expand_as(ours))  # no key that is here is needed any more
        return states

    partly = dataclasses.replace(
        ragged(tables, case.queries, case.contexts, BLOCK_SIZE),
        begins=torch.tensor([SPAN * sum(spans) for spans in case.lenders], dtype=torch.int32),
        states=arrive,
    )
    spread = backend.attend(query, ours, layer, partly, scoring)
    return spread, all_here, lambda: REFERENCE.attend(query, here, layer, batch, scoring)


@pytest.mark.skipif(library() is None, reason="no native kernels here")
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_native_attention_has_the_same_bits_wherever_the_leading_spans_lie(case: Case) -> None:
    torch.set_num_threads(case.threads)
    try:
        spread, all_here, expected = both_ways(NATIVE, case)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(spread.view(torch.int32), all_here.view(torch.int32))
    torch.testing.assert_close(spread, expected(), rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_torch_attention_continues_from_a_state(case: Case) -> None:
    spread, all_here, expected = both_ways(SDPA, case)
    torch.testing.assert_close(spread, expected(), rtol=1e-5, atol=1e-5)
    own = [row for row, spans in enumerate(case.lenders) if not spans]
    starts = [sum(case.queries[:row]) for row in range(len(case.queries) + 1)]
    for row in own:
        assert torch.equal(spread[starts[row] : starts[row + 1]], all_here[starts[row] : starts[row + 1]])


@pytest.mark.parametrize("backend", [SDPA, native], ids=lambda each: each.name)
def test_keys_outside_of_the_window_leave_the_state_as_it_is(backend: Attention) -> None:
    query, pool = torch.randn(3, 2, 8), torch.randn(8, 1, 1, 2, 16, 8)
    table = torch.arange(8, dtype=torch.int32)
    span = KeySpan(table, SPAN, SPAN + 10)
    neutral = backend.attend_span(query, pool, 0, span, Scoring(0.3, 10))
    assert neutral[..., 0].eq(-torch.inf).all() and neutral[..., 1:].eq(0).all()
    before = torch.rand(3, 2, 10)
    after = dataclasses.replace(span, state=before)
    assert torch.equal(backend.attend_span(query, pool, 0, after, Scoring(0.3, 10)), before)
    assert not torch.equal(backend.attend_span(query, pool, 0, after, Scoring(0.3, 12)), before)


@pytest.mark.skipif(library() is None, reason="no native kernels here")
def test_an_error_instead_of_states_is_the_error_of_the_attention() -> None:
    def arrive() -> Tensor:
        raise KeyError("a mistake")

    batch = ragged([[-1] * PER_SPAN + [3]], [1], [SPAN + 1], BLOCK_SIZE)
    batch = dataclasses.replace(batch, begins=torch.tensor([SPAN], dtype=torch.int32), states=arrive)
    with pytest.raises(KeyError, match="a mistake"):
        NATIVE.attend(torch.randn(1, 2, 8), torch.randn(8, 1, 1, 2, 16, 8), 0, batch, Scoring(0.3))


@pytest.mark.skipif(library() is None, reason="no native kernels here")
def test_a_span_is_a_tile_of_the_native_kernel() -> None:
    assert ctypes.c_int64.in_dll(library(), "diptych_attention_tile").value == SPAN  # type: ignore[arg-type]
