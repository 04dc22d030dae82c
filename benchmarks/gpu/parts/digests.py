"""Digests that the device makes: those of the host, bit for bit, and their speed."""

import numpy as np
import torch

from benchmarks.gpu.timing import read_bytes_s, seconds_of
from kvtransfer.digest import host_digests
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece
from kvtransfer.transport import Span
from workers.executor.kv_pool import DevicePool
from workers.ops.completion import side_stream_on
from workers.ops.triton_digest import launch, table_of

LARGE = KVLayout("8B", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")  # 2 MiB blocks
SHAPES = (("bfloat16", 128, 16), ("int8", 128, 16), ("fp8", 64, 32), ("float32", 40, 5), ("int8", 6, 40))
BLOCKS = 6


def measure(device: torch.device, *, tiny: bool) -> dict[str, object]:
    """Raises if a digest differs from the host's."""
    layers, heads = (2, 1) if tiny else (5, 4)
    cells = 0
    for dtype, head_dim, block_size in SHAPES:
        layout = KVLayout("m", layers, heads, head_dim, block_size, dtype)
        cells += _compare(layout, Piece(0, layout.heads, layout.layers), device)
        cells += _compare(layout, Piece(0, (heads - 1, heads), (1, layers)), device)
    return {"cells_equal_to_host": cells} | _speed(
        device, *((1, KVLayout("m", 1, 1, 16, 16)) if tiny else (1024, LARGE))
    )


def _compare(layout: KVLayout, box: Piece, device: torch.device) -> int:
    """Whole and partial blocks, and cells in two and three blocks."""
    size = layout.block_size
    rows: list[list[Span]] = [[(4, 0, size)], [(0, 0, size - 1)], [(5, 0, 1)]]
    rows += [[(1, 2, size - 2), (3, 0, 2)], [(2, size - 1, 1), (0, 0, size), (1, 0, 1)]]
    memory = torch.randint(0, 256, (BLOCKS * layout.block_bytes,), dtype=torch.uint8)
    found = DevicePool(memory.to(device), side_stream_on(device)).digests(0, layout, box, rows)
    wanted = host_digests(memoryview(memory.numpy().data), layout, box, rows)
    if not np.array_equal(found, wanted):
        share = float((found == wanted).mean())
        raise AssertionError(
            f"{layout.dtype} of {layout.head_dim}: {share:.0%} of {wanted.size} digests are the host's"
        )
    return wanted.size


def _speed(device: torch.device, num_blocks: int, layout: KVLayout) -> dict[str, object]:
    memory = torch.randint(0, 256, (num_blocks * layout.block_bytes,), dtype=torch.uint8, device=device)
    whole = Piece(0, layout.heads, layout.layers)
    rows: list[list[Span]] = [[(block, 0, layout.block_size)] for block in torch.randperm(num_blocks).tolist()]

    def kernel_s(count: int) -> float:
        table = table_of(layout, rows[:count])[0].to(device)
        digests = torch.empty((count, *layout.shape[:2]), dtype=torch.int64, device=device)
        return seconds_of(lambda: launch(memory, table, digests, layout, whole), device)

    all_s, read_s = kernel_s(num_blocks), memory.nbytes / read_bytes_s(device, memory.nbytes)
    pool = DevicePool(memory, side_stream_on(device))
    return {
        "kernel_gb_s": memory.nbytes / all_s / 1e9,
        "share_of_read": read_s / all_s,
        "kernel_one_block_us": kernel_s(1) * 1e6,
        "check_gb_s": memory.nbytes / seconds_of(lambda: pool.digests(0, layout, whole, rows), device) / 1e9,
        "check_one_block_us": seconds_of(lambda: pool.digests(0, layout, whole, rows[:1]), device) * 1e6,
    }
