"""Small zeroed buffers in host memory or on a GPU, for trials. Loads torch only for a GPU."""

import numpy as np


def buffer_on(device: str, num_bytes: int) -> tuple[int, object]:
    """The address of zeroed memory, and what keeps it alive."""
    if device == "cpu":
        array = np.zeros(num_bytes, np.uint8)
        return array.ctypes.data, array
    import torch

    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return memory.data_ptr(), memory
