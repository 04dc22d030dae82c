import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.paging import ragged, scattered_tables
from workers.ops.attention import REFERENCE, SDPA


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(query lengths, context lengths) with decodes first, as a step plan has them."""
    contexts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    decodes = draw(st.integers(0, len(contexts)))
    queries = [1 if row < decodes else draw(st.integers(1, context)) for row, context in enumerate(contexts)]
    return queries, contexts


@settings(max_examples=80, deadline=None)
@given(
    batch=batches(),
    block_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([0, 1, 7, 100]),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_sdpa_equals_the_reference(
    batch: tuple[list[int], list[int]],
    block_size: int,
    kv_heads: int,
    group: int,
    window: int,
    softcap: float,
    seed: int,
) -> None:
    queries, contexts = batch
    num_blocks, head_dim, layers = 250, 8, 2
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(num_blocks, kv_heads, layers, 2, block_size, head_dim, generator=generator)
    tables = scattered_tables(contexts, num_blocks, block_size, random.Random(seed))
    meta = ragged(tables, queries, contexts, block_size)
    query = torch.randn(sum(queries), kv_heads * group, head_dim, generator=generator)
    key, value = torch.randn(2, sum(queries), kv_heads, head_dim, generator=generator)
    pools = {REFERENCE: pool.clone(), SDPA: pool.clone()}
    outputs = []
    for backend, its_pool in pools.items():
        backend.write_kv(its_pool, key, value, 1, meta)
        outputs.append(backend.attend(query, its_pool, 1, meta, head_dim**-0.5, window, softcap))
    torch.testing.assert_close(pools[SDPA], pools[REFERENCE], rtol=0, atol=0)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_write_touches_only_its_layer_and_slots() -> None:
    pool = torch.zeros(4, 2, 3, 2, 4, 8)
    meta = ragged([[0, 1, 2]], [1], [10], 4)
    SDPA.write_kv(pool, torch.ones(1, 2, 8), torch.full((1, 2, 8), 2.0), 1, meta)
    assert pool[2, :, 1, 0, 1].eq(1).all() and pool[2, :, 1, 1, 1].eq(2).all()
    assert pool.sum() == 2 * 8 * (1 + 2)


def test_decode_ignores_what_other_owners_left_in_the_pool() -> None:
    """Neither a neighbour's NaN nor the reserved blocks reach a padded batch."""
    pool = torch.full((8, 1, 1, 2, 4, 8), torch.nan)
    tables = [[5], [6, 7]]
    pool[5] = pool[6] = pool[7] = 1.0
    meta = ragged(tables, [1, 1], [4, 8], 4)
    output = SDPA.attend(torch.ones(2, 2, 8), pool, 0, meta, 1.0)
    assert torch.equal(output, torch.ones(2, 2, 8))


def test_kv_in_bfloat16_is_attended_in_the_query_dtype() -> None:
    pool = torch.zeros(4, 2, 1, 2, 4, 8, dtype=torch.bfloat16)
    meta = ragged([[1, 2]], [6], [6], 4)
    key, value, query = torch.randn(3, 6, 2, 8)
    SDPA.write_kv(pool, key, value, 0, meta)
    arguments = (query, pool, 0, meta, 0.3)
    torch.testing.assert_close(SDPA.attend(*arguments), REFERENCE.attend(*arguments))


def test_ops_declare_what_they_mutate() -> None:
    pool, meta = torch.zeros(4, 2, 1, 2, 4, 8), ragged([[1, 2]], [6], [6], 4)
    key, value, query = torch.randn(3, 6, 2, 8)
    torch.library.opcheck(torch.ops.diptych.write_kv_sdpa.default, (pool, key, value, 0, meta.slot_mapping))
    arguments = (
        query,
        pool,
        0,
        meta.query_starts,
        meta.context_lens,
        meta.block_tables,
        meta.slot_mapping,
        6,
        6,
        0.3,
        0,
        0.0,
    )
    torch.library.opcheck(torch.ops.diptych.attend_sdpa.default, arguments)
