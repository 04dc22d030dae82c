"""The port between "these blocks shall arrive here" and whatever moves the bytes.

One `Transport` per rank and backend. It owns that rank's registration and its peers. It knows byte ranges;
it knows no lease, no request, no token. All methods are called from one event loop; a backend that blocks keeps
its own thread.

    connect ──> read ──> read.done     (result, or an error; a deadline is an error)
                  └────> read.settled  (no further byte can land in local memory)

`done` may come before `settled`: a NIXL transfer cannot be cancelled, so after a timeout the bytes may go on
landing. Whoever owns the target blocks frees them on `settled`, never on `done`.
"""

import asyncio
import ctypes
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.layout import KVLayout
from kvtransfer.ticket import ShardAddress


@dataclass(frozen=True, slots=True)
class Region:
    """One rank's whole block pool in memory: registered once, freed only after the transports closed.

    `owner` keeps the memory alive (a tensor, an array). `device` is "cpu" or "cuda:N".
    """

    layout: KVLayout
    num_blocks: int
    address: int
    owner: object = field(repr=False)
    device: str = "cpu"

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def bytes(self, offset: int = 0, num_bytes: int | None = None) -> memoryview:
        """A writable view of the pool's bytes (host memory only)."""
        if self.device != "cpu":
            raise ValueError(f"the KV pool lies on {self.device}: its bytes cannot be viewed from the host")
        length = self.num_bytes - offset if num_bytes is None else num_bytes
        if offset < 0 or length < 0 or offset + length > self.num_bytes:
            raise ValueError(f"bytes {offset}..{offset + length} lie outside the pool's {self.num_bytes}")
        return memoryview((ctypes.c_char * length).from_address(self.address + offset)).cast("B")


@dataclass(frozen=True, slots=True)
class Copy:
    """`num_bytes` from `source` (offset in the owner's pool) to `target` (offset in ours)."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What one read did. `seconds` is the time from its start on the wire to its end, without waiting in a queue.

    A checked pull also says how many digests it compared, and the seconds that took.
    """

    num_bytes: int
    num_descriptors: int
    seconds: float
    num_digests: int = 0
    digest_seconds: float = 0.0


@dataclass(slots=True)
class Read:
    """A read in flight. Owned by whoever owns the target blocks. See the module's picture for the two futures."""

    done: "asyncio.Future[ReadStats]"
    settled: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Read `source_blocks` of the connected peer into our `target_blocks`, pairwise, and check the digests.

    `digests[shard][i]` belongs to source_blocks[i]; empty: unchecked.
    """

    peer: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...]
    deadline_s: float


class Transport(Protocol):
    """One backend's end in one rank. Errors: those of `kvtransfer.errors`."""

    name: str

    def address(self) -> bytes:
        """Opaque bytes with which a peer's `connect` reaches this pool."""
        ...

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        """Meet the incarnation `peer`, and answer the path in words ("UCX cma/memory"). Repeating it is harmless."""
        ...

    def read(self, peer: str, copies: tuple[Copy, ...], *, deadline_s: float) -> Read:
        """Start reading from a connected peer. Every failure comes through the futures."""
        ...

    async def forget(self, peer: str) -> None:
        """Drop a peer that is gone. Reads from it end with `PeerLost`."""
        ...

    async def close(self) -> None:
        """Let go of everything; returns when no byte can land any more."""
        ...
