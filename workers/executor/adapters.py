"""The adapters of one rank: its part of each in host memory, and on the device of those that the last step used.

Knows no bound and no request: the worker says what to load and what to drop. Loads on a thread beside the steps.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from workers.errors import ModelError
from workers.executor.inputs import StepArrays
from workers.model.adapter import adapter_of, read_adapter
from workers.model.adapter_load import load_adapter
from workers.model.config import read_model_config
from workers.model.folder import ModelFolder
from workers.model.shard import ModelShard
from workers.ops.lora import QKV, LayerChanges, LinearChange, LowRank, StepAdapters
from workers.request import Adapter

Layers = Sequence[LayerChanges]


class RankAdapters:
    """`load` is called on the event loop, what `of_step` returns on the compute thread."""

    def __init__(
        self, folder: ModelFolder, shard: ModelShard, device: torch.device, dtype: torch.dtype, *, deterministic: bool
    ) -> None:
        self._folder = folder
        self._shard = shard
        self._device = device
        self._dtype = dtype
        self._deterministic = deterministic
        self._loaded: dict[str, Layers] = {}
        self._on_device: dict[str, Layers] = {}  # the compute thread's

    async def load(self, adapter: Adapter, drop: Sequence[str]) -> None:
        """Raises `ModelError` for a folder that is missing here, that does not fit the model, or that changed."""
        for each in drop:
            self._loaded.pop(each, None)
        self._loaded[adapter.id] = await asyncio.to_thread(self._read, adapter)

    def compile(self) -> None:
        """Launch the kernels once, with an adapter of zeros: else the first request with one waits for Triton."""
        a, b = torch.zeros(16, 64, dtype=self._dtype), torch.zeros(64, 16, dtype=self._dtype)
        layers = self._brought(({QKV: LinearChange((LowRank.of(a, b, 0),))},))
        x, y = torch.zeros(2, 1, 64, dtype=self._dtype, device=self._device)
        number = np.zeros(1, np.int32)
        step = StepAdapters((layers,), number, number, self._device, deterministic=self._deterministic)
        step.of_layer(0)(QKV, x, y)

    def of_step(self, arrays: StepArrays) -> Callable[[], StepAdapters]:
        """A function that copies the step's adapters to the device. It holds them, so they may be dropped meanwhile."""
        chosen = {each: self._loaded[each] for each in arrays.adapters}
        assert arrays.numbers is not None
        numbers = arrays.numbers

        def bring() -> StepAdapters:
            here = {each: self._on_device.get(each) or self._brought(layers) for each, layers in chosen.items()}
            self._on_device = here
            layers = tuple(here.values())
            return StepAdapters(layers, numbers, arrays.rows, self._device, deterministic=self._deterministic)

        return bring

    def _brought(self, layers: Layers) -> Layers:
        if self._device.type == "cpu":
            return layers
        return tuple(
            {
                name: LinearChange(tuple(part.to(self._device) for part in change.parts))
                for name, change in layer.items()
            }
            for layer in layers
        )

    def _read(self, adapter: Adapter) -> Layers:
        path = Path(adapter.path)
        if adapter_of(adapter.name, path, self._folder).id != adapter.id:
            raise ModelError(f"{path} is not what was loaded as adapter {adapter.name!r}; unload it, and load it again")
        model = read_model_config(self._folder.path)
        return load_adapter(read_adapter(path, model), model, self._shard, self._dtype)
