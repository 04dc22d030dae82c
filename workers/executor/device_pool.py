"""The bytes of a pool on a GPU, for transports: probe blocks and digests of what arrived. See `DeviceBytes`."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Span
from workers.ops.completion import SideStream
from workers.ops.triton_digest import cell_digests


class DevicePool:
    """`memory` [byte] is the region. Works beside the steps, so the caller must know that the bytes are written."""

    def __init__(self, memory: Tensor, side_stream: SideStream) -> None:
        self._memory = memory
        self._side_stream = side_stream

    def load(self, offset: int, num_bytes: int) -> bytes:
        with self._side_stream():
            found = self._memory[offset : offset + num_bytes].to("cpu", non_blocking=True)
        return found.numpy().tobytes()

    def store(self, offset: int, data: bytes) -> None:
        with self._side_stream():
            self._memory[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def digests(self, offset: int, layout: KVLayout, box: Piece, rows: Sequence[Sequence[Span]]) -> NDArray[np.uint64]:
        with self._side_stream():
            digests = cell_digests(self._memory[offset:], layout, box, rows).to("cpu", non_blocking=True)
        return digests.numpy().view(np.uint64)
