"""Loads the part of an adapter that changes one rank's part of a model.

Knows which tensor changes which fused linear layer. A column-parallel layer has its rows of B and all of A, a
row-parallel one its columns of A and all of B: the sum over the ranks that the layer makes anyway completes it.
"""

from collections.abc import Sequence

import torch

from workers.model.adapter import AdapterFolder
from workers.model.description import ModelConfig
from workers.model.load import Cut, qkv_cuts, stacked, turned, value_columns
from workers.model.shard import ModelShard, Range
from workers.model.weights import Weights
from workers.ops.lora import DOWN, GATE_UP, OUTPUT, QKV, LayerChanges, LinearChange, LowRank


def load_adapter(
    folder: AdapterFolder, model: ModelConfig, shard: ModelShard, dtype: torch.dtype
) -> tuple[LayerChanges, ...]:
    """The changes of each of the shard's layers, in host memory. Raises `ModelError` for NaN or infinity."""
    loading = _Loading(folder, model, dtype)
    names, ffn = model.names, (model.ffn_size, shard.ffn)
    columns: dict[str, tuple[tuple[str, ...], tuple[Cut, ...]]] = {
        QKV: (names.qkv, qkv_cuts(model, shard)),
        GATE_UP: (names.gate_up, (ffn, ffn)),
    }
    rows = {OUTPUT: (names.output, value_columns(model, shard)), DOWN: (names.down, ffn[1])}
    layers: list[LayerChanges] = []
    for index in range(*shard.layers):
        prefix = f"{names.root}.layers.{index}."
        parts = {kind: loading.column_parallel(prefix, *each) for kind, each in columns.items()}
        parts |= {kind: loading.row_parallel(prefix + name, each) for kind, (name, each) in rows.items()}
        layers.append({kind: LinearChange(each) for kind, each in parts.items() if each})
    return tuple(layers)


class _Loading:
    def __init__(self, folder: AdapterFolder, model: ModelConfig, dtype: torch.dtype) -> None:
        self._folder = folder
        self._model = model
        self._weights = Weights(folder.path, torch.device("cpu"), dtype, [folder.weights])

    def column_parallel(self, prefix: str, names: Sequence[str], cuts: Sequence[Cut]) -> tuple[LowRank, ...]:
        found, first = [], 0
        for part in stacked(names, cuts):
            if prefix + part.name in self._folder.modules:
                found.append(self._low_rank(prefix + part.name, first, rows=part.rows))
            first += part.rows[1] - part.rows[0]
        return tuple(found)

    def row_parallel(self, module: str, columns: Range) -> tuple[LowRank, ...]:
        if module not in self._folder.modules:
            return ()
        return (self._low_rank(module, 0, columns=columns),)

    def _low_rank(self, module: str, first: int, rows: Range | None = None, columns: Range | None = None) -> LowRank:
        """`rows` of B and `columns` of A. Copies: the file may change later."""
        name = f"base_model.model.{module}.lora"
        a = self._weights.take(f"{name}_A.weight", columns=columns)
        b = turned(self._model, module, self._weights.take(f"{name}_B.weight", rows))
        return LowRank.of(a, b * self._folder.scale, first)
