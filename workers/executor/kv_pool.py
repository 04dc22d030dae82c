"""One rank's KV memory: a tensor of blocks, registered with the transports as a `Region`, and the host cache's blocks.

Knows how much memory this process may take. Knows no sequence: the engine assigns the blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.digest import spans_of
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Region, Span
from workers.engine.step import StepPlan
from workers.errors import ModelError
from workers.executor.kv_sizing import SPARE
from workers.ops.completion import RecordEvent, SideStream, record_event_on, side_stream_on, wait
from workers.ops.memory import PAGES, pinned
from workers.ops.narrow import from_slots, to_slots, torch_dtype

# Bytes of staged blocks that are converted at once: a GPU hides the launches of its kernels, a CPU stays in its cache.
_CONVERTED_BYTES = {"cpu": 0, "cuda": 16 << 20}


@dataclass(frozen=True, slots=True)
class KVPool:
    """`blocks` [block, kv_head, layer, k|v, slot, slot_size] and its `region` are the same memory.

    `host` [host block, ...] holds evicted prefixes; it is not in the region, so peers cannot read it.
    `record_event` gives an event for all writes so far: transfers read the memory outside the device's queue. What
    transfers do with the memory runs on `side_stream`, beside the steps.
    """

    memory: Tensor  # [byte], all of the region
    blocks: Tensor
    region: Region
    host: Tensor
    record_event: RecordEvent
    side_stream: SideStream

    def move(self, plan: StepPlan) -> None:
        """Make the plan's copies, which come before its chunks: swap out, swap in, copy. No block is in two of them.

        On a GPU they are done when the step's event is, so the host's blocks too must stay as they are until then.
        """
        for pairs, source, target in (
            (plan.swap_out, self.blocks, self.host),
            (plan.swap_in, self.host, self.blocks),
            (plan.copies, self.blocks, self.blocks),
        ):
            for first, into, count in _runs(pairs):
                target[into : into + count].copy_(source[first : first + count], non_blocking=True)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        """Zero blocks with unverified bytes: a NaN would leak through a masked attention weight of 0.

        Returns when they are zero, since the next transfer may write there. Called on the compute thread.
        """
        for block in blocks:
            self.blocks[block].zero_()
        wait(self.record_event())

    def place(self, offset: int, layout: KVLayout, blocks: tuple[int, ...], first_token: int, num_tokens: int) -> None:
        """Copy staged KV into the pool, in its dtype: see `kvtransfer.transport.Place`. Called on a thread of its own.

        Rounds to nearest, as `to_slots` does.
        """
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # of this thread; more would compete with the compute thread
        ours = self.region.layout
        heads = slice(layout.heads[0] - ours.heads[0], layout.heads[1] - ours.heads[0])
        layers = slice(layout.layers[0] - ours.layers[0], layout.layers[1] - ours.layers[0])
        staged = self.memory[offset : offset + layout.blocks_for(num_tokens) * layout.block_bytes]
        arrived = staged.view(torch_dtype(layout.dtype)).view(-1, *layout.shape)
        is_alike = layout.dtype == ours.dtype  # then slots move as they are
        sources: Iterable[Tensor] = arrived
        at_once = _CONVERTED_BYTES[self.memory.device.type] // layout.block_bytes
        spans = spans_of(layout.block_size, ours.block_size, blocks, first_token, num_tokens)
        with self.side_stream():
            if not is_alike and at_once > 1:
                sources, is_alike = _converted(arrived, self.blocks.dtype, at_once), True
            for source, parts in zip(sources, spans, strict=True):
                start = 0
                for block, slot, count in parts:
                    slots = source[:, :, :, start : start + count]  # [kv_head, layer, k|v, slot, slot_size]
                    if not is_alike:
                        slots = to_slots(from_slots(slots, torch.float32), self.blocks.dtype)
                    self.blocks[block, heads, layers, :, slot : slot + count] = slots
                    start += count


def _converted(blocks: Tensor, dtype: torch.dtype, at_once: int) -> Iterator[Tensor]:
    """Yield the blocks one by one, converted to slots of `dtype`."""
    for first in range(0, len(blocks), at_once):
        yield from to_slots(from_slots(blocks[first : first + at_once], torch.float32), dtype)


def _runs(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first target, number of blocks) of pairs that follow each other in both; one copy takes them."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


class DevicePool:
    """The bytes of a pool on a GPU, for transports: probe blocks and digests of what arrived. See `DeviceBytes`.

    `memory` [byte] is the region. Works beside the steps, so the caller must know that the bytes are written.
    """

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
        from workers.ops.triton_digest import cell_digests  # only where Triton is installed

        with self._side_stream():
            digests = cell_digests(self._memory[offset:], layout, box, rows).to("cpu", non_blocking=True)
        return digests.numpy().view(np.uint64)


def allocate_pool(
    layout: KVLayout,
    num_blocks: int,
    device: torch.device,
    host_blocks: int = 0,
    staging_bytes: int = 0,
    *,
    spare: float = SPARE,
) -> KVPool:
    """Zeroed memory for `num_blocks` blocks, a staging area, and `host_blocks` blocks of host memory.

    `spare`: the share of the device's free memory that must be left. Raises `ModelError` with the number of blocks that
    would fit.
    """
    available_bytes, _ = memory_of(device)
    fitting_blocks = max(0, int(available_bytes * (1 - spare)) - staging_bytes) // layout.block_bytes
    if num_blocks > fitting_blocks:
        raise ModelError(
            f"engine.kv_blocks is {num_blocks}: {num_blocks * layout.block_bytes / 2**30:.1f} GiB of KV do not fit "
            f"in the {available_bytes / 2**30:.1f} GiB available on {device}; at most {fitting_blocks} blocks "
            f"({fitting_blocks * layout.block_size} tokens) would"
        )
    spare_bytes = memory_of(torch.device("cpu"))[0] - (device.type == "cpu") * num_blocks * layout.block_bytes
    if host_blocks * layout.block_bytes > spare_bytes * (1 - SPARE):
        raise ModelError(
            f"cache.host takes {host_blocks * layout.block_bytes / 2**30:.1f} GiB, which do not fit in the "
            f"{max(0, spare_bytes) / 2**30:.1f} GiB of host memory left; lower it or engine.kv_blocks"
        )
    dtype = torch_dtype(layout.dtype)
    region = Region(layout, num_blocks, 0, None, staging_bytes=staging_bytes)
    record_event, side_stream = record_event_on(device), side_stream_on(device)
    if device.type == "cpu":
        memory = PAGES.empty(region.num_bytes)
    else:
        memory = torch.zeros(region.num_bytes, dtype=torch.uint8, device=device)
        wait(record_event())  # before anything is written beside the steps
        region = replace(region, device=f"cuda:{memory.device.index}", device_bytes=DevicePool(memory, side_stream))
    region = replace(region, address=memory.data_ptr(), owner=memory)
    blocks = memory[: region.pool_bytes].view(dtype).view(num_blocks, *layout.shape)
    return KVPool(memory, blocks, region, _host_memory(layout, host_blocks, device), record_event, side_stream)


def _host_memory(layout: KVLayout, num_blocks: int, device: torch.device) -> Tensor:
    """Zeroed blocks in the host's memory, pinned if the device is a GPU. Raises `ModelError`."""
    dtype = torch_dtype(layout.dtype)
    if device.type == "cpu" or not num_blocks:
        return torch.zeros((num_blocks, *layout.shape), dtype=dtype)
    num_bytes = num_blocks * layout.block_bytes
    try:
        memory = pinned(num_bytes)
    except RuntimeError as error:
        raise ModelError(
            f"{num_bytes / 2**30:.1f} GiB of host memory cannot be pinned for {device}; lower cache.host: {error}"
        ) from error
    return memory.view(dtype).view(num_blocks, *layout.shape)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Available and total bytes. On a CPU the smaller of the machine's and the cgroup's."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return int(free_bytes), int(total_bytes)
    machine = psutil.virtual_memory()
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max", hence ValueError, when unlimited
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return int(machine.available), int(machine.total)
    return min(int(machine.available), max(0, limit - used)), min(int(machine.total), limit)
