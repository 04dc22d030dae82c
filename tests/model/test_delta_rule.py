"""The delta rule of each kind of kernel computes what torch does, whatever lies before a step and how it is cut."""

import random
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from tests.model.paging import ragged, scattered_tables
from workers.ops import delta_rule
from workers.ops.delta_rule import Gates
from workers.ops.native.library import library

pytest.importorskip("triton")
from workers.ops import triton_delta

SIZES = {"kv_heads": 2, "key_heads": 2, "heads": 4, "key_dim": 12, "dim": 40, "taps": 4}
Computed = tuple[Tensor, Tensor, Tensor]  # both outputs, and the states


def computed(kind: str, cuts: list[list[int]], block_size: int, seed: int) -> Computed:
    """The outputs of sequences whose tokens come in these cuts, one cut of each a step."""
    kv_heads, key_heads, heads, key_dim, dim, taps = SIZES.values()
    generator = torch.Generator().manual_seed(seed)
    lengths = [sum(cut) for cut in cuts]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 2
    tables = scattered_tables(lengths, num_blocks, block_size, random.Random(seed))
    channels = 2 * key_heads // kv_heads * key_dim + heads // kv_heads * dim
    mixed = [torch.randn(length, kv_heads, channels, generator=generator) for length in lengths]
    weight = torch.randn(kv_heads, taps, channels, generator=generator)
    ab = [torch.randn(2, length, heads, generator=generator) for length in lengths]
    rate, bias = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    numbers = (taps - 1) * channels, heads // kv_heads * key_dim * dim
    states = torch.full((num_blocks, kv_heads, sum(numbers) + 3), torch.nan)[..., : sum(numbers)]
    conv_states, rule_states = torch.split(states, list(numbers), dim=-1)
    done, outputs = [0] * len(cuts), [list[Tensor]() for _ in cuts]
    convolved = [list[Tensor]() for _ in cuts]
    for step in range(max(map(len, cuts))):
        chosen = [index for index, cut in enumerate(cuts) if step < len(cut)]
        news = [cuts[index][step] for index in chosen]
        rows = [slice(done[index], done[index] + new) for index, new in zip(chosen, news, strict=True)]
        for index, new in zip(chosen, news, strict=True):
            done[index] += new
        batch = ragged([tables[index] for index in chosen], news, [done[index] for index in chosen], block_size)
        x = torch.cat([mixed[index][row] for index, row in zip(chosen, rows, strict=True)])
        a, b = torch.cat([ab[index][:, row] for index, row in zip(chosen, rows, strict=True)], dim=1).contiguous()
        conv = triton_delta.causal_conv if kind == "triton" else delta_rule.causal_conv
        x = conv(x, weight, conv_states, batch, block_size)
        keys = key_heads // kv_heads * key_dim
        query, key, value = torch.split(x, [keys, keys, channels - 2 * keys], dim=-1)
        q, k = (each.reshape(-1, key_heads, key_dim) for each in (query, key))
        value = value.reshape(-1, heads, dim)
        if kind == "triton":
            q, k = (torch.nn.functional.normalize(each, dim=-1, eps=1e-3) for each in (q, k))
            q = q / key_dim**0.5
            output = triton_delta.gated_delta_rule(q, k, value, a, b, rate, bias, rule_states, batch, block_size)
        else:
            output = delta_rule.gated_delta_rule(q, k, value, Gates(a, b, rate, bias), rule_states, batch, block_size)
        for index, part, other in zip(chosen, output.split(news), x.split(news), strict=True):
            outputs[index].append(part)
            convolved[index].append(other)
    used = sorted(block for table in tables for block in table)
    return torch.cat([*chain(*outputs)]), torch.cat([*chain(*convolved)]), states[used]


def check(found: Computed, wanted: Computed) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


cuts = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=2)


@examples(6)
@given(cuts=cuts, block_size=st.integers(3, 6), seed=st.integers(0, 9))
def test_kernels_compute_what_torch_does(cuts: list[list[int]], block_size: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "library", lambda: None)
        wanted = computed("torch", cuts, block_size, seed)
    assert all(each.isfinite().all() for each in wanted)
    check(computed("triton", cuts, block_size, seed), wanted)
    if library() is not None:
        check(computed("native", cuts, block_size, seed), wanted)


@pytest.mark.parametrize("kind", ["native", pytest.param("triton", marks=pytest.mark.full)])
def test_no_cut_changes_a_bit(kind: str) -> None:
    if library() is None:
        pytest.skip("there are no native kernels")
    whole = computed(kind, [[13], [9]], 4, 1)
    cut = computed(kind, [[1, 6, 1, 1, 4], [8, 1]], 4, 1)
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
