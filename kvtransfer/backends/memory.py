"""Copies between pools of one process: the reference in tests, and the path of workers that share a process.

Knows the pools that joined the same `SharedMemory`; knows no thread and no socket. A read has settled when it returns.
"""

import time
import uuid

from kvtransfer.backends.pending_read import PendingRead
from kvtransfer.copies import refuse_outside
from kvtransfer.errors import TransferError, TransportUnavailable, not_connected
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import Copies, Read, Region


class SharedMemory:
    """The pools of one process that may read each other. Owned by the code that starts the workers."""

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}


class MemoryTransport:
    """`Transport` by plain memory copies inside one process."""

    name = "memory"

    def __init__(self, region: Region, shared: SharedMemory) -> None:
        self._region = region
        self._shared = shared
        self._key = uuid.uuid4().hex
        self._peers: dict[str, str] = {}
        shared.regions[self._key] = region

    def address(self) -> bytes:
        return self._key.encode()

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        key = dict(shard.transports)[self.name].decode(errors="replace")
        if key not in self._shared.regions:
            raise TransportUnavailable(f"{peer} lives in another process: memory is not shared with it")
        self._peers[peer] = key
        return "in-process copy"

    def read(self, peer: str, copies: Copies, *, deadline_s: float) -> Read:
        pending = PendingRead(peer, copies, deadline_s)
        begun = time.monotonic()
        try:
            self._copy(peer, copies)
        except (TransferError, ValueError) as error:
            pending.abort(error)
        else:
            pending.complete(time.monotonic() - begun)
        return pending.read

    def _copy(self, peer: str, copies: Copies) -> None:
        source = self._shared.regions.get(self._peers.get(peer, ""))
        if source is None:
            raise not_connected(peer)
        refuse_outside(copies, source.pool_bytes, self._region.num_bytes)
        theirs, ours = source.bytes(), self._region.bytes()
        for start, target, num_bytes in copies.tolist():
            ours[target : target + num_bytes] = theirs[start : start + num_bytes]

    async def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    async def close(self) -> None:
        self._peers.clear()
        self._shared.regions.pop(self._key, None)
