"""Low-rank changes of linear layers (LoRA): y += (x A) B, for each row of a batch with its own A and B, or none.

Knows rows and numbered adapters; knows no model and no file. A row without an adapter is not touched, so it keeps its
bits. Our kernel computes each row alone in a fixed order; torch, where there is no kernel, one adapter's rows at a
time. Source: Hu et al., LoRA (2021); batches of many adapters: Chen et al., Punica (2023), Sheng et al., S-LoRA (2023).
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from workers.ops.linear.dense import alike
from workers.ops.native.library import kernel, library, pointer

QKV, OUTPUT, GATE_UP, DOWN = "qkv", "output", "gate_up", "down"  # the linear layers of a decoder's layer
Change = Callable[[str, Tensor, Tensor], None]
"""(linear layer, its x [rows, in], its y [rows, out]): adds each row's change to y."""

RANK_MULTIPLE = 16  # as in native/lora.cpp
_ENTRY = struct.Struct("@PPqqq")  # as `Entry` in native/lora.cpp


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of some output features of a linear layer, from `first` on."""

    a: Tensor  # [in, rank], with columns of zeros up to a multiple of 16
    b: Tensor  # [rank, out], with the adapter's scale
    first: int

    @classmethod
    def of(cls, a: Tensor, b: Tensor, first: int) -> "LowRank":
        """From A [rank, in] and B [out, rank], which are copied."""
        return cls(F.pad(a.t(), (0, -len(a) % RANK_MULTIPLE)).contiguous(), b.t().contiguous(), first)

    def to(self, device: torch.device) -> "LowRank":
        return LowRank(self.a.to(device, non_blocking=True), self.b.to(device, non_blocking=True), self.first)


@dataclass(frozen=True, slots=True)
class LinearChange:
    """One adapter's change of a linear layer, with up to `parts` low-rank parts beside each other."""

    parts: tuple[LowRank, ...]
    entries: bytes = field(init=False)  # of the kernel

    def __post_init__(self) -> None:
        addressed = [
            _ENTRY.pack(pointer(each.a), pointer(each.b), each.first, each.b.shape[1], each.b.shape[0])
            for each in self.parts
        ]
        object.__setattr__(self, "entries", b"".join(addressed))


LayerChanges = Mapping[str, LinearChange]  # by the linear layer's name


class StepAdapters:
    """The adapters of one step: `adapters[n]` has the changes of each layer, `numbers` [rows] an n for each row, or -1.

    All tensors of an adapter are on `device`, A and B in the dtype of x. `sampled`: the rows with which the last layer
    goes on.
    """

    def __init__(
        self,
        adapters: Sequence[Sequence[LayerChanges]],
        numbers: NDArray[np.int32],
        sampled: NDArray[np.integer[Any]],
        device: torch.device,
        *,
        deterministic: bool,
    ) -> None:
        self._adapters = adapters
        self._numbers = numbers
        self._sampled = sampled
        self._device = device
        self._deterministic = deterministic
        self._native = device.type == "cpu" and library() is not None
        by_adapter = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers < 0) :].astype(np.int32)
        self._rows, self._of_rows = by_adapter, numbers[by_adapter]
        starts = np.searchsorted(self._of_rows, np.arange(1, len(adapters)))
        self._segments = [] if self._native else torch.from_numpy(by_adapter).to(device).tensor_split(starts.tolist())

    def at_rows(self) -> "StepAdapters":
        """For the sampled rows only."""
        numbers = self._numbers[self._sampled]
        return StepAdapters(self._adapters, numbers, self._sampled, self._device, deterministic=self._deterministic)

    def of_layer(self, layer: int) -> Change:
        def change(name: str, x: Tensor, y: Tensor) -> None:
            changes = [adapter[layer].get(name) for adapter in self._adapters]
            if any(changes):
                (self._by_kernel if self._native else self._by_torch)(changes, x, y)

        return change

    def _by_kernel(self, changes: Sequence[LinearChange | None], x: Tensor, y: Tensor) -> None:
        assert y.is_contiguous() and x.dtype == y.dtype == torch.float32
        x = x.contiguous()
        counts = np.array([0, *(len(each.parts) if each else 0 for each in changes)], np.int32).cumsum(dtype=np.int32)
        entries = b"".join([each.entries for each in changes if each])
        kernel("lora")(
            pointer(x), x.shape[1], pointer(y), y.shape[1], self._rows.ctypes.data, self._of_rows.ctypes.data,
            len(self._rows), counts.ctypes.data, entries, torch.get_num_threads(),
        )  # fmt: skip

    def _by_torch(self, changes: Sequence[LinearChange | None], x: Tensor, y: Tensor) -> None:
        product = (lambda x, w: alike(w, None, x)) if self._deterministic else F.linear
        for rows, each in zip(self._segments, changes, strict=True):
            for part in each.parts if each and len(rows) else ():
                columns = slice(part.first, part.first + part.b.shape[1])
                inner = product(x[rows], part.a[:, : len(part.b)].t())
                y[rows, columns] += product(inner, part.b.t())
