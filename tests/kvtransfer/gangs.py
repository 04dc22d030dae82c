"""Owners of several ranks, each with its own pool, in one process of their own or in this one."""

from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvtransfer.digest import digest_cells
from kvtransfer.layout import KVLayout
from kvtransfer.open import SharedMemory, TransportSet
from kvtransfer.ticket import PeerAddress
from kvtransfer.transport import Region
from tests.kvtransfer.grids import Bytes, by_slots
from tests.kvtransfer.peers import make_region, open_set
from workers.ops.narrow import to_slots, torch_dtype

NUM_TOKENS = 90
NUM_BLOCKS = 24


def truth(layout: KVLayout) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """The KV of a prompt, as bfloat16 holds it too: [token, kv_head, layer, k|v, head_dim]."""
    shape = NUM_TOKENS, layout.num_kv_heads, layout.num_layers, 2, layout.head_dim
    numbers = np.random.default_rng(1).standard_normal(shape, np.float32)
    return (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)


def as_bytes(numbers: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", dtype: str) -> Bytes:
    """The numbers in an owner's dtype, with their bytes as the last axis."""
    held = to_slots(torch.from_numpy(numbers), torch_dtype(dtype))
    return held.view(torch.uint8).numpy()


def blocks_of(layout: KVLayout) -> tuple[int, ...]:
    """Where an owner keeps the prompt: scattered, and running downwards in part."""
    count = layout.blocks_for(NUM_TOKENS)
    return tuple(np.random.default_rng(2).permutation(np.arange(2, NUM_BLOCKS))[:count].tolist())


class Gang:
    """One owner: a pool and a `TransportSet` for each rank."""

    def __init__(self, backend: str, name: str, ranks: Sequence[KVLayout], shared: SharedMemory | None = None) -> None:
        numbers = truth(ranks[0])
        self.name = name
        self.regions: list[Region] = []
        self.opened: list[TransportSet] = []
        for rank, layout in enumerate(ranks):
            region = make_region(layout, NUM_BLOCKS)
            pool = by_slots(np.frombuffer(region.bytes(), np.uint8), layout)
            local = as_bytes(numbers[:, slice(*layout.heads), slice(*layout.layers)], layout.dtype)
            for token, block in enumerate(np.repeat(blocks_of(layout), layout.block_size)[:NUM_TOKENS]):
                pool[block, :, :, :, token % layout.block_size] = local[token]
            self.regions.append(region)
            self.opened.append(open_set(region, (backend,), name, rank=rank, shared=shared))

    def address(self) -> PeerAddress:
        shards = tuple(opened.shard() for opened in self.opened)
        return PeerAddress("worker-" + self.name, self.name, "127.0.0.1", 0, shards)

    def cells(self, slots: tuple[tuple[int, int], ...]) -> tuple[tuple[bytes, ...], ...]:
        """[rank][block]"""
        return tuple(digest_cells(region, slots) for region in self.regions)

    def swap(self, one: int, other: int) -> None:
        """Two blocks of the first rank change places."""
        size = self.regions[0].layout.block_bytes
        pool = np.frombuffer(self.regions[0].bytes(), np.uint8).reshape(-1, size)
        pool[[one, other]] = pool[[other, one]]

    def damage(self, block: int) -> None:
        """One bit of the last rank, in the V of the block's first token. Twice is never."""
        layout = self.regions[-1].layout
        pool = by_slots(np.frombuffer(self.regions[-1].bytes(), np.uint8), layout)
        pool[block, -1, -1, 1, 0, -1] ^= 1

    async def close(self) -> None:
        for opened in self.opened:
            await opened.close()


def own_gangs(pipe: Connection, backend: str, gangs: dict[str, tuple[KVLayout, ...]]) -> None:
    """The owners' program: sends all addresses, then calls what it is asked for, until the pipe closes."""
    owned = {name: Gang(backend, name, ranks) for name, ranks in gangs.items()}
    pipe.send({name: gang.address() for name, gang in owned.items()})
    while True:
        try:
            name, verb, *arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(owned[name], verb)(*arguments))
