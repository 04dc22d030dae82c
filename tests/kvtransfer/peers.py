"""Real pools, owners in a second process, and readers that can be killed: what the transfer tests are made of."""

import asyncio
import contextlib
import multiprocessing as mp
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np

from kvtransfer.digest import combine, digest_cells
from kvtransfer.layout import KVLayout
from kvtransfer.links import TransportSet
from kvtransfer.open import open_transports
from kvtransfer.ticket import PeerAddress, Piece, rank_name
from kvtransfer.transport import Copies, PullOrder, Region
from tests.kvtransfer.pages_driver import PagesDriver, SharedPages

SECRET = b"the secret of the test cluster"
LAYOUT = KVLayout("test-model", num_layers=4, num_kv_heads=2, head_dim=16, block_size=16)  # 16 KiB blocks
LARGE = KVLayout("test-model", num_layers=8, num_kv_heads=4, head_dim=64, block_size=64)  # 1 MiB blocks
NUM_BLOCKS = 64


def block_bytes_of(block: int, layout: KVLayout = LAYOUT) -> bytes:
    """What an owner's block holds in these tests."""
    return np.random.default_rng(block).bytes(layout.block_bytes)


def make_region(layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS, *, filled: bool = False) -> Region:
    pages = SharedPages(num_blocks * layout.block_bytes)
    region = Region(layout, num_blocks, pages.address, pages)
    if filled:
        for block in range(num_blocks):
            region.bytes(block * layout.block_bytes, layout.block_bytes)[:] = block_bytes_of(block, layout)
    return region


def block_of(region: Region, block: int) -> bytes:
    size = region.layout.block_bytes
    return bytes(region.bytes(block * size, size))


def ranges(*rows: tuple[int, int, int]) -> Copies:
    """Byte ranges (source, target, number of bytes), as they are."""
    return np.array(rows, np.int64).reshape(-1, 3)


def whole_blocks(*pairs: tuple[int, int], size: int = LAYOUT.block_bytes) -> Copies:
    """One unmerged range for each (source block, target block)."""
    return ranges(*((source * size, target * size, size) for source, target in pairs))


def whole_piece(layout: KVLayout = LAYOUT) -> Piece:
    """All that the only rank of an owner holds."""
    return Piece(0, layout.heads, layout.layers)


def cells_of(region: Region, blocks: tuple[int, ...]) -> tuple[bytes, ...]:
    """The digests of whole blocks' cells, as an owner makes them."""
    return digest_cells(region, [(block, region.layout.block_size) for block in blocks])


def checked_order(region: Region, sources: tuple[int, ...], targets: tuple[int, ...], peer: str = "owner") -> PullOrder:
    """A pull of whole blocks between equal layouts, with the digests of what `region` holds now."""
    piece, num_tokens = whole_piece(region.layout), len(sources) * region.layout.block_size
    digests = combine(cells_of(region, sources), region.layout, piece)
    return PullOrder(peer, sources, targets, 0, num_tokens, ((piece, digests),), deadline_s=10)


def open_set(region: Region, backends: tuple[str, ...], incarnation: str, **options: Any) -> TransportSet:
    """`cuda_ipc` shares pages of host memory instead of a GPU's."""
    options = {"secret": SECRET, "host": "127.0.0.1", "incarnation": incarnation, **options}
    with mock.patch("kvtransfer.backends.cuda_ipc.open_driver", PagesDriver):
        return open_transports(region, backends, **options)


def address_of(opened: TransportSet, incarnation: str) -> PeerAddress:
    return PeerAddress("worker-" + incarnation, incarnation, "127.0.0.1", 0, (opened.shard(),))


@dataclass
class Child:
    """A process of ours: `ask` it things, `end` it."""

    process: Any
    pipe: Connection

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, *request: object) -> Any:
        self.pipe.send(request)
        return self.receive()

    def receive(self) -> Any:
        assert self.pipe.poll(30), "the child process does not answer"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def start(target: Any, *arguments: object) -> Child:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return Child(process, ours)


def start_owner(
    backend: str, incarnation: str, layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS
) -> tuple[Child, PeerAddress]:
    child = start(own, backend, incarnation, layout, num_blocks)
    return child, child.receive()


def own(pipe: Connection, backend: str, incarnation: str, layout: KVLayout, num_blocks: int) -> None:
    """An owner: opens its pool and sends its address, then answers until the pipe closes."""
    region = make_region(layout, num_blocks, filled=True)
    opened = open_set(region, (backend,), incarnation)
    pipe.send(address_of(opened, incarnation))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request == ("damage",):
            region.bytes()[5 * layout.block_bytes + 7] ^= 1
        pipe.send("alive")


def read_for_ever(pipe: Connection, backend: str, peer: PeerAddress) -> None:
    """A reader that reads until it is killed; says when it has begun."""
    asyncio.run(_read_for_ever(pipe, backend, peer))


async def _read_for_ever(pipe: Connection, backend: str, peer: PeerAddress) -> None:
    layout, count = peer.shards[0].layout, peer.shards[0].num_blocks
    region = make_region(layout, count)
    opened = open_set(region, (backend,), "reader-to-die")
    await opened.connect(peer)
    transport = opened._transports[0]
    pairs = [(block, count + 1 - block) for block in range(2, count)]
    copies = whole_blocks(*pairs, size=layout.block_bytes)
    pipe.send("reading")
    while True:
        await transport.read(rank_name(peer.incarnation, 0), copies, deadline_s=30).done


def callers() -> list[socket.socket]:
    """More than one: what ends late elsewhere in this process may free a descriptor, which a caller then takes."""
    return [socket.socket() for _ in range(8)]


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """As in a process that has used them all: one that other threads close meanwhile is above the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)
