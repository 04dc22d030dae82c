"""The port of the backends that move bytes between pools.

One `Transport` per rank and backend. It owns that rank's registration and its peers. It knows byte ranges;
it knows no lease, no request, no token. All methods are called from one event loop; a backend that blocks keeps
its own thread.

    connect ──> read ──> read.done     (result, or an error; a deadline is an error)
                  └────> read.settled  (nothing is written to local memory any more)

`done` may come before `settled`: a NIXL transfer cannot be cancelled, so it may go on
after a timeout. The owner of the target blocks frees them on `settled`, never on `done`.
"""

import asyncio
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece, ShardAddress

Copies: TypeAlias = NDArray[np.int64]
"""Byte ranges [range, (offset in the owner's pool, offset in our region, number of bytes)]."""

Span: TypeAlias = tuple[int, int, int]
"""Slots of one block: the block, the first slot, and the number of slots."""

ALIGNMENT = 64  # bytes; of the staging area


class DeviceBytes(Protocol):
    """Reaches the bytes of a region on a device. A call waits for the device; any thread may call."""

    def load(self, offset: int, num_bytes: int) -> bytes:
        """A copy of bytes of the region."""
        ...

    def store(self, offset: int, data: bytes) -> None:
        """Write bytes of the region."""
        ...

    def digests(self, offset: int, layout: KVLayout, box: Piece, rows: Sequence[Sequence[Span]]) -> NDArray[np.uint64]:
        """As `kvtransfer.digest.host_digests`, for blocks from `offset` on."""
        ...


@dataclass(frozen=True, slots=True)
class Region:
    """One rank's whole block pool in memory: registered once, freed only after the transports closed.

        | block 0 | block 1 | ... | last block | (aligned) staging area |

    `owner` keeps the memory alive (a tensor, an array). `device` is "cpu" or "cuda:N", where `device_bytes` reaches the
    bytes. The staging area receives KV that must be converted before it enters a block.
    """

    layout: KVLayout
    num_blocks: int
    address: int
    owner: object = field(repr=False)
    device: str = "cpu"
    staging_bytes: int = 0
    device_bytes: DeviceBytes | None = field(default=None, repr=False)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the blocks, which peers may read; without the staging area."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def staging_offset(self) -> int:
        return -(-self.pool_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.staging_offset + self.staging_bytes if self.staging_bytes else self.pool_bytes

    def bytes(self, offset: int = 0, num_bytes: int | None = None) -> memoryview:
        """A writable view of the pool's bytes (host memory only)."""
        if self.device != "cpu":
            raise ValueError(f"the KV pool is on {self.device}: its bytes cannot be viewed from the host")
        length = self.num_bytes - offset if num_bytes is None else num_bytes
        if offset < 0 or length < 0 or offset + length > self.num_bytes:
            raise ValueError(f"bytes {offset}..{offset + length} are outside the pool's {self.num_bytes}")
        return memoryview((ctypes.c_char * length).from_address(self.address + offset)).cast("B")


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What one read did. `seconds` is the time from its start on the wire to its end, without waiting in a queue.

    A checked pull also reports how many digests it compared, and the seconds that took.
    """

    num_bytes: int
    num_descriptors: int
    seconds: float
    num_digests: int = 0
    digest_seconds: float = 0.0


def summed(parts: Iterable[ReadStats]) -> ReadStats:
    """Reads that ran beside each other as one: counts add up, `seconds` are those of the longest."""
    stats = tuple(parts)
    return ReadStats(
        num_bytes=sum(each.num_bytes for each in stats),
        num_descriptors=sum(each.num_descriptors for each in stats),
        seconds=max((each.seconds for each in stats), default=0.0),
        num_digests=sum(each.num_digests for each in stats),
        digest_seconds=sum(each.digest_seconds for each in stats),
    )


@dataclass(slots=True)
class Read:
    """A read in flight. Owned by the owner of the target blocks. See the module's picture for the two futures."""

    done: "asyncio.Future[ReadStats]"
    settled: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Read and check the KV of `num_tokens` tokens of a connected peer, from the one at position `first_token` on.

    `first_token` begins a block of the owner. `source_blocks` are the owner's blocks from there on; `target_blocks`
    are ours from the one that holds `first_token` on; block sizes may differ. `digests` holds, for each piece, one
    number for each source block; none at all: unchecked. The same order goes to every rank of a reader, and each takes
    the pieces that are its own.
    """

    peer: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    first_token: int
    num_tokens: int
    digests: tuple[tuple[Piece, tuple[int, ...]], ...]
    deadline_s: float


class Place(Protocol):
    """Converts staged KV into blocks of the pool. Called off the event loop, one call at a time."""

    def __call__(
        self, offset: int, layout: KVLayout, blocks: tuple[int, ...], first_token: int, num_tokens: int
    ) -> None:
        """From `offset` on the region holds whole blocks [block, kv_head, layer, k|v, slot, head_dim] of `layout`: its
        dtype, its block size, and the absolute heads and layers it covers. Its first `num_tokens` slots are the tokens
        at positions first_token ...; `blocks` are ours from the one that holds `first_token` on.
        """
        ...


class Transport(Protocol):
    """One backend's end in one rank. Errors: those of `kvtransfer.errors`."""

    name: str

    def address(self) -> bytes:
        """Opaque bytes for a peer's `connect` to this pool."""
        ...

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        """Connect to the rank `peer` (see `rank_name`); returns the path in words ("UCX cma/memory").

        May be repeated.
        """
        ...

    def read(self, peer: str, copies: Copies, *, deadline_s: float) -> Read:
        """Start reading from a connected peer. Every failure is set on the futures."""
        ...

    async def forget(self, peer: str) -> None:
        """Drop a peer that is gone. Reads from it end with `PeerLost`."""
        ...

    async def close(self) -> None:
        """Release everything; returns when nothing is written to local memory any more."""
        ...
