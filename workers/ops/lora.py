"""Low-rank changes of linear layers (LoRA): y += (x A) B, for each row of a batch with its own A and B, or none.

Knows rows and numbered adapters; knows no model and no file. A row without an adapter is not touched, so it keeps its
bits. Our kernels compute each row in a fixed order, whatever the others: C++ on a CPU, Triton on a GPU. Source: Hu et
al., LoRA (2021); batches of many adapters: Chen et al., Punica (2023), Sheng et al., S-LoRA (2023).
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from workers.ops.linear.dense import alike
from workers.ops.native.library import kernel, library, pointer
from workers.ops.staging import to_device

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


NO_CHANGE = LinearChange(())
LayerChanges = Mapping[str, LinearChange]  # by the linear layer's name


class StepAdapters:
    """The adapters of one step: `adapters[n]` has the changes of each layer, `numbers` [rows] an n for each row, or -1.

    All tensors of an adapter are on `device`, A and B in the dtype of x. `sampled`: the rows with which the last layer
    of the model goes on after attention.
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
        self._make = partial(StepAdapters, sampled=sampled, device=device, deterministic=deterministic)
        self._adapters, self._numbers, self._sampled = adapters, numbers, sampled
        rows = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers < 0) :].astype(np.int32)
        self._add = _method(_Rows(adapters, rows, numbers[rows], device, deterministic))

    def of_layer(self, layer: int) -> Change:
        return partial(self._add, layer)

    def of_last_layer(self) -> Change:
        """For the sampled rows."""
        last = [each[-1:] for each in self._adapters]
        return self._make(last, self._numbers[self._sampled]).of_layer(0)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows with an adapter, sorted by it; `numbers`: the adapter of each of these."""

    adapters: Sequence[Sequence[LayerChanges]]
    rows: NDArray[np.int32]
    numbers: NDArray[np.int32]
    device: torch.device
    deterministic: bool


def _by_kernel(given: _Rows, layer: int, name: str, x: Tensor, y: Tensor) -> None:
    assert y.is_contiguous() and x.dtype == y.dtype == torch.float32
    changes, x = [adapter[layer].get(name, NO_CHANGE) for adapter in given.adapters], x.contiguous()
    starts = np.cumsum([0, *(len(each.parts) for each in changes)], dtype=np.int32)
    kernel("lora")(
        pointer(x), x.shape[1], pointer(y), y.shape[1], given.rows.ctypes.data, given.numbers.ctypes.data,
        len(given.rows), starts.ctypes.data, b"".join([each.entries for each in changes]), torch.get_num_threads(),
    )  # fmt: skip


class _ByTriton:
    """The same. Tiles, rows and the entries of all layers reach the device in one copy."""

    def __init__(self, given: _Rows) -> None:
        from workers.ops.triton_lora import ROWS  # only where Triton is installed: torch for CUDA brings it

        rows, numbers = given.rows, given.numbers
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
        tiles = [
            (numbers[first], first, min(ROWS, end - first))
            for begin, end in pairwise(starts)
            for first in range(begin, end, ROWS)
        ]
        self._places: dict[tuple[int, str], int] = {}
        tables: list[NDArray[Any]] = [np.array(tiles, np.int32).reshape(-1, 3), rows]
        for layer, of_layer in enumerate(zip(*given.adapters, strict=True)):
            for name in dict.fromkeys(name for each in of_layer for name in each):
                self._places[layer, name] = len(tables)
                tables.append(_table([each.get(name, NO_CHANGE) for each in of_layer]))
        self._on_host, self._on_device = tables, to_device(tables, given.device)

    def __call__(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        from workers.ops import triton_lora

        place = self._places.get((layer, name))
        if place is not None and len(self._on_host[1]):
            entries, (tiles, rows) = self._on_host[place], self._on_device[:2]
            most = int(entries[:, :, 4].max()), int(entries[:, :, 3].max())
            triton_lora.add(x, y, rows, tiles, self._on_device[place], most)


def _table(changes: Sequence[LinearChange]) -> NDArray[np.int64]:
    """[adapters, parts, fields of an entry], zeros where an adapter has fewer parts."""
    parts = max(len(each.parts) for each in changes)
    filled = [each.entries.ljust(parts * _ENTRY.size, b"\0") for each in changes]
    return np.frombuffer(bytearray(b"".join(filled)), np.int64).reshape(len(changes), parts, -1)


class _ByTorch:
    """The same, one adapter after another, where there is no kernel."""

    def __init__(self, given: _Rows) -> None:
        self._adapters = given.adapters
        self._product = (lambda x, w: alike(w, None, x)) if given.deterministic else F.linear
        ends = np.searchsorted(given.numbers, np.arange(1, len(given.adapters)))
        self._segments = torch.from_numpy(given.rows).to(given.device).tensor_split(ends.tolist())

    def __call__(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        for rows, adapter in zip(self._segments, self._adapters, strict=True):
            for part in adapter[layer].get(name, NO_CHANGE).parts if len(rows) else ():
                columns = slice(part.first, part.first + part.b.shape[1])
                inner = self._product(x[rows], part.a[:, : len(part.b)].t())
                y[rows, columns] += self._product(inner, part.b.t())


def _method(given: _Rows) -> Callable[[int, str, Tensor, Tensor], None]:
    """(layer, linear layer, x, y): adds each row's change to y."""
    if given.device.type == "cuda":
        return _ByTriton(given)
    return partial(_by_kernel, given) if library() is not None else _ByTorch(given)
