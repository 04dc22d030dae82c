"""Inputs of a step reach a GPU as views of one buffer."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.ops.staging import ALIGNMENT, packed, to_device, to_host

CPU = torch.device("cpu")
TYPES = [np.int64, np.int32, np.float64, np.float32, np.uint8]


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), min_size=1, max_size=2)), min_size=1, max_size=6
    )
)
def test_packed_tensors_are_aligned_views_of_one_buffer(shapes: list[tuple[type, list[int]]]) -> None:
    random = np.random.default_rng(0)
    tensors = [torch.from_numpy(random.integers(0, 100, shape).astype(dtype)) for dtype, shape in shapes]
    moved = packed(tensors, CPU)
    for before, after in zip(tensors, moved, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after) and after.is_contiguous()
        assert after.storage_offset() * after.itemsize % ALIGNMENT == 0
    assert len({each.untyped_storage().data_ptr() for each in moved}) == 1


def test_a_cpu_copies_nothing() -> None:
    array = np.arange(3)
    (tensor,) = to_device([array], CPU)
    assert tensor.data_ptr() == array.ctypes.data
    assert to_host([tensor])[0] is tensor
