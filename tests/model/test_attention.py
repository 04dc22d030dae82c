"""Every backend computes what the reference does. DIPTYCH_TEST_DEVICE=cuda runs all of it on a GPU."""

import dataclasses
import os
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples
from tests.model.paging import ragged, scattered_tables
from workers.ops.attention import NATIVE, REFERENCE, SDPA, TRITON, TRITON_INVARIANT, Attention
from workers.ops.batch import RaggedBatch, Scoring
from workers.ops.narrow import compute_dtype, from_slots, to_slots
from workers.ops.native.library import library

DEVICE = torch.device(os.environ.get("DIPTYCH_TEST_DEVICE", "cpu"))
EXAMPLES = 120 if DEVICE.type == "cpu" else 12  # on a GPU, each compiles its kernels
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
BLOCKS = 260

try:
    from workers.ops import triton_paged
except ImportError:
    triton_paged = None  # type: ignore[assignment]

native = pytest.param(NATIVE, marks=pytest.mark.skipif(library() is None, reason="no native kernels here"))
triton = pytest.param(TRITON, marks=pytest.mark.skipif(triton_paged is None, reason="no Triton here"))
invariant = pytest.param(TRITON_INVARIANT, marks=pytest.mark.skipif(triton_paged is None, reason="no Triton here"))
FAST = [SDPA, native] if DEVICE.type == "cpu" else [SDPA, triton, invariant]
ALL = [*FAST, triton, invariant] if DEVICE.type == "cpu" else FAST


@dataclasses.dataclass(frozen=True)
class Case:
    queries: list[int]
    contexts: list[int]
    block_size: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    window: int
    softcap: float
    seed: int
    sinks: bool = False
    vectors: int = 2


@st.composite
def cases(draw: st.DrawFn, longest: int = 60, vectors: tuple[int, ...] = (2,)) -> Case:
    """Batches with decodes first, as a step plan has them."""
    contexts = draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    if draw(st.booleans()):
        contexts[0] += draw(st.sampled_from([64, 128, 140]))  # over the borders of the kernels' tiles
    decodes = draw(st.integers(0, len(contexts)))
    return Case(
        queries=[1 if row < decodes else draw(st.integers(1, context)) for row, context in enumerate(contexts)],
        contexts=contexts,
        block_size=draw(st.sampled_from([1, 4, 16])) if sum(contexts) < BLOCKS else draw(st.sampled_from([4, 16])),
        kv_heads=draw(st.sampled_from([1, 3])),
        group=draw(st.sampled_from([1, 3, 7])),
        head_dim=draw(st.sampled_from([8, 40, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.sampled_from([0, 1, 7, 100, -1, -7, -100])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        seed=draw(st.integers(0, 2**16)),
        sinks=draw(st.booleans()),
        vectors=draw(st.sampled_from(vectors)),
    )


def on_device(batch: RaggedBatch) -> RaggedBatch:
    tensors: dict[str, Any] = {
        name: value.to(DEVICE) for name in batch.__slots__ if isinstance(value := getattr(batch, name), Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def equals_the_reference(backend: Attention, case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    tables = scattered_tables(case.contexts, BLOCKS, case.block_size, random.Random(case.seed))
    shape = (BLOCKS, case.kv_heads, 2, case.vectors, case.block_size, case.head_dim)
    pool = torch.full(shape, torch.nan)  # other blocks must not matter
    own = [block for table in tables for block in table]
    pool[own] = torch.randn(len(own), *shape[1:], generator=generator)
    tokens = sum(case.queries)
    dtype = compute_dtype(DEVICE, case.dtype)
    query = torch.randn(tokens, case.kv_heads * case.group, case.head_dim, generator=generator).to(DEVICE, dtype)
    key, value = torch.randn(2, tokens, case.kv_heads, case.head_dim, generator=generator).to(DEVICE, dtype)
    meta = on_device(ragged(tables, case.queries, case.contexts, case.block_size))
    expected_pool, its_pool = (to_slots(pool, case.dtype).to(DEVICE, copy=True) for _ in range(2))
    sinks = torch.randn(query.shape[1], generator=generator).mul(8).to(DEVICE, dtype) if case.sinks else None
    arguments = (1, meta, Scoring(case.head_dim**-0.5, case.window, case.softcap, sinks))
    REFERENCE.write_kv(expected_pool, key, value, 1, meta.slot_mapping)
    backend.write_kv(its_pool, key, value, 1, meta.slot_mapping)
    assert torch.equal(its_pool.view(torch.uint8), expected_pool.view(torch.uint8))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = REFERENCE.attend(query, expected_pool, *arguments)
    torch.testing.assert_close(backend.attend(query, its_pool, *arguments), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", FAST, ids=lambda each: each.name)
@examples(EXAMPLES)
@given(case=cases())
def test_backend_equals_the_reference(backend: Attention, case: Case) -> None:
    equals_the_reference(backend, case)


@pytest.mark.parametrize(
    "backend", [each for each in FAST if each not in (triton, invariant)], ids=lambda each: each.name
)
@examples(EXAMPLES // 2)
@given(case=cases(vectors=(1,)))
def test_a_latent_is_key_and_value(backend: Attention, case: Case) -> None:
    equals_the_reference(backend, case)


def test_the_reference_of_a_latent_is_that_of_equal_keys_and_values() -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(6, 1, 2, 1, 4, 24, generator=generator)
    query = torch.randn(3, 5, 24, generator=generator)
    batch = ragged([[4, 1, 2]], [3], [11], 4)
    both = latents.expand(-1, -1, -1, 2, -1, -1)
    results = [REFERENCE.attend(query, pool, 1, batch, Scoring(0.2)) for pool in (latents, both)]
    assert torch.equal(*results)


@pytest.mark.skipif(triton_paged is None or DEVICE.type != "cpu", reason="no Triton here, or a GPU for it")
@examples(25)
@given(case=cases(longest=30), backend=st.sampled_from([TRITON, TRITON_INVARIANT]))
def test_triton_equals_the_reference_in_its_interpreter(case: Case, backend: Attention) -> None:
    equals_the_reference(backend, case)


@pytest.mark.parametrize("window", [0, 270, -300])
@pytest.mark.parametrize("backend", ALL, ids=lambda each: each.name)
def test_many_keys_are_attended_to_in_several_spans(backend: Attention, window: int) -> None:
    case = Case([1, 1, 3, 20], [256, 700, 640, 521], 16, 1, 3, 8, torch.float32, window, 0.0, 0, sinks=True)
    equals_the_reference(backend, case)


@pytest.mark.grid(keep=2)
@pytest.mark.skipif(triton_paged is None, reason="no Triton here")
@pytest.mark.parametrize("window", [0, 270, -300])
@pytest.mark.parametrize("longest", [256, 1024])  # several spans, and one
def test_decodes_that_fill_the_device_have_long_spans(
    window: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_paged, "PROGRAMS", 4)
    monkeypatch.setattr(triton_paged, "LONG_SPLIT", longest)
    for queries, group, dtype in ([1, 1, 1, 1], 3, torch.float32), ([1, 1, 1, 1, 1, 20], 7, torch.int8):
        contexts = [256, 700, 1, 513, 129, 521][: len(queries)]
        equals_the_reference(TRITON, Case(queries, contexts, 16, 1, group, 8, dtype, window, 0.0, 0, sinks=True))


@pytest.mark.parametrize("backend", ALL, ids=lambda each: each.name)
def test_write_touches_only_its_layer_and_slots(backend: Attention) -> None:
    pool = torch.zeros(4, 2, 3, 2, 4, 8, device=DEVICE)
    meta = on_device(ragged([[0, 1, 2]], [1], [10], 4))
    key, value = torch.ones(1, 2, 8, device=DEVICE), torch.full((1, 2, 8), 2.0, device=DEVICE)
    backend.write_kv(pool, key, value, 1, meta.slot_mapping)
    assert pool[2, :, 1, 0, 1].eq(1).all() and pool[2, :, 1, 1, 1].eq(2).all()
    assert pool.sum() == 2 * 8 * (1 + 2)


@pytest.mark.parametrize("backend", ALL, ids=lambda each: each.name)
def test_what_exceeds_the_range_of_float16_is_written_as_its_largest_number(backend: Attention) -> None:
    pool = torch.zeros(4, 1, 1, 2, 4, 8, device=DEVICE, dtype=torch.float16)
    meta = on_device(ragged([[0, 1, 2]], [1], [10], 4))
    numbers = torch.tensor([1e5, -1e9, torch.inf, -torch.inf, 65519.0, 65520.0, torch.nan, 3.0], device=DEVICE)
    backend.write_kv(pool, numbers.view(1, 1, 8), -numbers.view(1, 1, 8), 0, meta.slot_mapping)
    written = torch.tensor([65504, -65504, 65504, -65504, 65504, 65504, torch.nan, 3], dtype=torch.float16)
    for half, sign in ((0, 1), (1, -1)):
        torch.testing.assert_close(pool[2, 0, 0, half, 1].cpu(), sign * written, rtol=0, atol=0, equal_nan=True)


class NoFp8Rows(TorchDispatchMode):
    """As a torch whose GPUs select no rows of fp8."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.index_select.default or args[0].dtype != torch.float8_e4m3fn
        return func(*args, **(kwargs or {}))


def test_torch_reads_fp8_as_bytes() -> None:
    pool = to_slots(torch.randn(4, 2, 1, 2, 4, 8), torch.float8_e4m3fn).to(DEVICE)
    meta = on_device(ragged([[0, 1, 2]], [1], [10], 4))
    query = torch.randn(1, 4, 8, device=DEVICE)
    with NoFp8Rows():
        found = SDPA.attend(query, pool, 0, meta, Scoring(0.1))
    torch.testing.assert_close(found, REFERENCE.attend(query, pool, 0, meta, Scoring(0.1)))


@pytest.mark.grid(keep=3)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.int8, 0.5001 / 127), (torch.float8_e4m3fn, 1.001 / 16)])
@pytest.mark.parametrize("backend", ALL, ids=lambda each: each.name)
def test_quantized_slots_depend_on_their_own_vector_alone(
    backend: Attention, dtype: torch.dtype, rounding: float
) -> None:
    """Vectors of any size, written together and one by one; NaN and infinity are not hidden."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-42, 38, (320, 1, 1), generator=generator)
    vectors = torch.randn(320, 1, 12, generator=generator) * sizes
    vectors[0], vectors[1, 0, 3] = 0.0, torch.finfo(torch.float32).max
    vectors[318, 0, 3], vectors[319, 0, 3] = torch.nan, -torch.inf
    vectors = vectors.to(DEVICE)
    slots = ragged([list(range(20))], [320], [320], 16).slot_mapping.to(DEVICE)
    together, apart = torch.zeros(2, 20, 1, 1, 2, 16, 16, device=DEVICE).to(dtype)
    backend.write_kv(together, vectors, -vectors, 0, slots)
    for token in torch.randperm(320, generator=generator).tolist():
        one = slice(token, token + 1)
        backend.write_kv(apart, vectors[one], -vectors[one], 0, slots[one])
    assert torch.equal(apart.view(torch.uint8), together.view(torch.uint8))
    for half, numbers in ((0, vectors[:, 0]), (1, -vectors[:, 0])):
        written = together[:, 0, 0, half].flatten(0, 1)
        assert torch.equal(written.view(torch.uint8)[:318], to_slots(numbers, dtype).view(torch.uint8)[:318])
        values, largest = from_slots(written, torch.float32), numbers[:318].abs().amax(-1, keepdim=True)
        assert ((values - numbers)[:318].abs() <= rounding * largest + torch.finfo(torch.float32).tiny).all()
        assert values[318:].isnan().all()


@pytest.mark.grid(keep=3)
@pytest.mark.parametrize("backend", ALL, ids=lambda each: each.name)
def test_fp8_numbers_are_rounded_to_nearest_as_torch_rounds_them(backend: Attention) -> None:
    """All numbers of e4m3, the middles between them, and what is next to each; the scale is 1."""
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = torch.cat([finite, (finite[1:] + finite[:-1]) / 2])
    near = torch.cat([exact, *(exact.nextafter(torch.tensor(end)) for end in (-1.0, 448.0))])
    near = torch.cat([near, -near]).to(DEVICE)
    vectors = torch.stack([torch.full_like(near, 448.0), near], dim=1)[:, None]
    pool = torch.zeros(len(near), 1, 1, 2, 1, 2 + 4, device=DEVICE).to(torch.float8_e4m3fn)
    slots = torch.arange(len(near), device=DEVICE)
    backend.write_kv(pool, vectors, vectors, 0, slots)
    rounded = near.to(torch.float8_e4m3fn)
    for half in (0, 1):
        assert torch.equal(pool[:, 0, 0, half, 0, 1].view(torch.uint8), rounded.view(torch.uint8))
    assert torch.equal(from_slots(pool, torch.float32)[:, 0, 0, 0, 0, 1], rounded.float())


@pytest.mark.parametrize("backend", ALL, ids=lambda each: each.name)
def test_views_of_a_fused_projection_are_read_by_their_strides(backend: Attention) -> None:
    fused = torch.randn(5, 4 + 2 * 2, 8, device=DEVICE)
    query, key, value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    meta = on_device(ragged([[1, 2]], [5], [7], 4))
    answers = []
    for parts in ((query, key, value), tuple(each.contiguous() for each in (query, key, value))):
        pool = torch.ones(4, 2, 1, 2, 4, 8, device=DEVICE)
        backend.write_kv(pool, parts[1], parts[2], 0, meta.slot_mapping)
        answers.append(backend.attend(parts[0], pool, 0, meta, Scoring(0.3)))
    assert torch.equal(*answers)


@pytest.mark.parametrize("backend", ALL, ids=lambda each: each.name)
def test_scores_of_any_size_give_numbers(backend: Attention) -> None:
    torch.manual_seed(0)  # some draws have two keys whose scores, of up to 80,000, are equal up to float32's rounding
    pool = (torch.randn(4, 1, 1, 2, 4, 8) * 100).to(DEVICE)
    meta = on_device(ragged([[1, 2]], [5], [7], 4))
    query = (torch.randn(5, 2, 8) * 100).to(DEVICE)
    for softcap in (0.0, 30.0):
        arguments = (query, pool, 0, meta, Scoring(1.0, 0, softcap))
        expected = REFERENCE.attend(*arguments)
        torch.testing.assert_close(backend.attend(*arguments), expected, rtol=1e-4, atol=1e-2)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Lengths of chunks that make up `length`; often many single tokens, which are decodes."""
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(draw(st.sampled_from([1, 1, min(left, 9), draw(st.integers(1, left))])))
    return lengths


@pytest.mark.parametrize("backend", [native] if DEVICE.type == "cpu" else [invariant], ids=lambda each: each.name)
@examples(EXAMPLES // 2)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_a_row_is_the_same_in_any_batch_and_any_cut(backend: Attention, data: st.DataObject, seed: int) -> None:
    """Bit for bit: the whole prompt alone, against its chunks in batches with others, on one thread and on two."""
    assert backend.batch_invariant
    length = data.draw(st.sampled_from([5, 40, 130, 300]))
    group, window, softcap = data.draw(
        st.tuples(st.sampled_from([1, 3]), st.sampled_from([0, 17, -17, -100]), st.just(0.0))
    )
    dtype, head_dim, block_size = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([8, 40, 64])), 16
    generator = torch.Generator().manual_seed(seed)
    query_dtype = compute_dtype(DEVICE, dtype)
    pool = to_slots(torch.randn(80, 2, 1, 2, block_size, head_dim, generator=generator), dtype).to(DEVICE)
    query = torch.randn(length, 2 * group, head_dim, generator=generator).to(DEVICE, query_dtype)
    table, *mates = scattered_tables([length, 33, 200], 80, block_size, random.Random(seed))

    def attend(tables: list[list[int]], lengths: list[int], contexts: list[int], rows: Tensor) -> Tensor:
        meta = on_device(ragged(tables, lengths, contexts, block_size))
        return backend.attend(rows, pool, 0, meta, Scoring(head_dim**-0.5, window, softcap))

    alone = attend([table], [length], [length], query)
    done, parts = 0, []
    try:
        for chunk in data.draw(cuts(length)):
            torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
            others = torch.randn(2, 2 * group, head_dim, generator=generator).to(DEVICE, query_dtype)
            rows = torch.cat([others, query[done : done + chunk]])
            done += chunk
            beside = data.draw(st.booleans())
            answer = (
                attend([*mates, table], [1, 1, chunk], [33, 200, done], rows)
                if beside
                else torch.cat([others, attend([table], [chunk], [done], rows[2:])])
            )
            parts.append(answer[2:])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.cat(parts), alone)
