"""One rank's KV memory: a single tensor of blocks, handed to the transports as a `Region`, and one to swap to.

Knows how much memory this process may take. Knows no sequence: which block is whose is the engine's business.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from kvtransfer.layout import KVLayout
from kvtransfer.transport import Region
from workers.engine.step import StepPlan
from workers.errors import ModelError
from workers.ops.memory import PAGES

# Left for activations, the interpreter's own growth and the rest of the machine.
_SPARE = 0.1


@dataclass(frozen=True, slots=True)
class KVPool:
    """`blocks` [block, kv_head, layer, k|v, slot, head_dim] and its `region` are the same memory.

    `host` [host block, ...] keeps the KV of preempted sequences; it is no part of the region, so no peer can reach it.
    """

    blocks: Tensor
    region: Region
    host: Tensor

    def move(self, plan: StepPlan) -> None:
        """The copies that a plan wants before its chunks: save, bring back, copy. No block is in two of them."""
        for pairs, source, target in (
            (plan.swap_out, self.blocks, self.host),
            (plan.swap_in, self.host, self.blocks),
            (plan.copies, self.blocks, self.blocks),
        ):
            if pairs:
                taken, given = zip(*pairs, strict=True)
                target[list(given)] = source[list(taken)].to(target.device)

    def scrub(self, blocks: tuple[int, ...]) -> None:
        """Zero blocks whose bytes nobody vouches for: a stray NaN would leak through a masked attention weight of 0."""
        self.blocks[list(blocks)] = 0


def allocate_pool(layout: KVLayout, num_blocks: int, device: torch.device, host_blocks: int = 0) -> KVPool:
    """Zeroed memory for `num_blocks` blocks, and for `host_blocks` on the host.

    Raises `ModelError`, saying how many would fit, when it does not.
    """
    available_bytes = _available_bytes(device)
    fitting_blocks = int(available_bytes * (1 - _SPARE)) // layout.block_bytes
    if num_blocks > fitting_blocks:
        raise ModelError(
            f"engine.kv_blocks is {num_blocks}: {num_blocks * layout.block_bytes / 2**30:.1f} GiB of KV do not fit "
            f"in the {available_bytes / 2**30:.1f} GiB available on {device}; at most {fitting_blocks} blocks "
            f"({fitting_blocks * layout.block_size} tokens) would"
        )
    spare_bytes = _available_bytes(torch.device("cpu")) - (device.type == "cpu") * num_blocks * layout.block_bytes
    if host_blocks * layout.block_bytes > spare_bytes * (1 - _SPARE):
        raise ModelError(
            f"engine.swap_blocks is {host_blocks}: {host_blocks * layout.block_bytes / 2**30:.1f} GiB do not fit in "
            f"the {max(0, spare_bytes) / 2**30:.1f} GiB of host memory left; lower it or engine.kv_blocks"
        )
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if device.type == "cpu":
        blocks = PAGES.empty(num_blocks * layout.block_bytes).view(dtype).view(num_blocks, *layout.shape)
    else:
        blocks = torch.zeros((num_blocks, *layout.shape), dtype=dtype, device=device)
    name = "cpu" if device.type == "cpu" else f"cuda:{blocks.device.index}"
    host = torch.zeros((host_blocks, *layout.shape), dtype=dtype, pin_memory=device.type == "cuda" and host_blocks > 0)
    return KVPool(blocks, Region(layout, num_blocks, blocks.data_ptr(), blocks, name), host)


def _available_bytes(device: torch.device) -> int:
    """What may still be allocated: on a GPU its free memory, on a host the lesser of the machine's and the cgroup's."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    available = int(psutil.virtual_memory().available)
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max", hence ValueError, when unlimited
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, max(0, limit - used))
