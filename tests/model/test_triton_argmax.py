"""In Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton_argmax = pytest.importorskip("workers.ops.triton_argmax", exc_type=ImportError)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocab=st.integers(1, 300) | st.sampled_from([4096, 4097, 9000]),
    levels=st.sampled_from([2, 30, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_it_is_numpys_argmax_with_ties_and_minus_infinity(
    rows: int, vocab: int, levels: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randint(-levels, levels, (rows, vocab), generator=generator) / levels).to(dtype)
    broken = torch.randint(0, 2, (rows,), generator=generator).bool()
    for row in broken.nonzero()[:, 0].tolist():
        at = int(torch.randint(0, vocab, (1,), generator=generator))
        logits[row, at] = [torch.nan, torch.inf, -torch.inf][at % 3]
    tokens, finite = triton_argmax.likeliest(logits)
    assert finite.tolist() == (~broken).tolist()
    wanted = np.argmax(logits.float().numpy(), axis=-1)
    assert tokens[~broken].tolist() == wanted[~broken.numpy()].tolist()
