"""Inputs of a step reach a GPU as views of one buffer."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from workers.ops.staging import ALIGNMENT, staged, to_device, to_host, views_of

CPU = torch.device("cpu")
TYPES = [np.int64, np.int32, np.float64, np.float32, np.uint8]


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), min_size=1, max_size=2)), min_size=1, max_size=6
    )
)
def test_staged_arrays_are_aligned_views_of_one_buffer(shapes: list[tuple[type, list[int]]]) -> None:
    random = np.random.default_rng(0)
    arrays: list[NDArray[Any]] = [random.integers(0, 100, shape).astype(dtype) for dtype, shape in shapes]
    moved = views_of(staged(arrays, pin=False), arrays)
    for before, after in zip(map(torch.from_numpy, arrays), moved, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after) and after.is_contiguous()
        assert after.storage_offset() * after.itemsize % ALIGNMENT == 0
    assert len({each.untyped_storage().data_ptr() for each in moved}) == 1


def test_a_cpu_copies_nothing() -> None:
    array = np.arange(3)
    (tensor,) = to_device([array], CPU)
    assert tensor.data_ptr() == array.ctypes.data
    assert to_host([tensor])[0] is tensor
