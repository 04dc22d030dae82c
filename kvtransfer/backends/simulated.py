"""A transport that takes the time of a transfer but moves no bytes, for simulation.

Knows a link's latency and bandwidth; uses no memory, no thread and only the event loop's clock, so it runs under
virtual time. Reads over one link run one after the other.
"""

import asyncio
from dataclasses import dataclass

from kvtransfer.backends.pending_read import PendingRead
from kvtransfer.copies import refuse_outside
from kvtransfer.errors import TransferError, TransferTimeout, not_connected
from kvtransfer.ticket import ShardAddress
from kvtransfer.transport import Copies, Read, Region


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Seconds of one read: latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(slots=True)
class _Wire:
    """The link to one owner: the size of its pool in bytes, and when the reads queued so far end."""

    source_bytes: int
    free_s: float = 0.0


class SimulatedTransport:
    """`Transport` whose reads take simulated seconds. At the deadline a read stops and settles at once.

    A stopped read still occupies the link: later reads end no earlier.
    """

    name = "simulated"

    def __init__(self, region: Region, model: LinkModel) -> None:
        self._region = region
        self._model = model
        self._wires: dict[str, _Wire] = {}
        self._pending: dict[PendingRead, asyncio.TimerHandle] = {}

    def address(self) -> bytes:
        return b"simulated"

    async def connect(self, peer: str, shard: ShardAddress, *, deadline_s: float) -> str:
        if self._model.latency_s > deadline_s:
            await asyncio.sleep(deadline_s)
            raise TransferTimeout(f"{peer} did not answer within {deadline_s} s")
        await asyncio.sleep(self._model.latency_s)
        self._wires.setdefault(peer, _Wire(shard.num_blocks * shard.layout.block_bytes))
        return f"simulated ({self._model.latency_s * 1e6:.0f} us, {self._model.bytes_per_s / 1e9:.2f} GB/s)"

    def read(self, peer: str, copies: Copies, *, deadline_s: float) -> Read:
        pending = PendingRead(peer, copies, deadline_s, overdue=self._stop)
        wire = self._wires.get(peer)
        if wire is None:
            pending.abort(not_connected(peer))
            return pending.read
        try:
            refuse_outside(copies, wire.source_bytes, self._region.num_bytes)
        except (TransferError, ValueError) as error:
            pending.abort(error)
            return pending.read
        loop = asyncio.get_running_loop()
        seconds = self._model.seconds(pending.num_bytes) if len(copies) else 0.0
        wire.free_s = max(wire.free_s, loop.time()) + seconds
        self._pending[pending] = loop.call_at(wire.free_s, self._complete, pending, seconds)
        return pending.read

    def _complete(self, pending: PendingRead, seconds: float) -> None:
        del self._pending[pending]
        pending.complete(seconds)

    def _stop(self, pending: PendingRead) -> None:
        if (timer := self._pending.pop(pending, None)) is not None:
            timer.cancel()
            pending.settle()

    async def forget(self, peer: str) -> None:
        self._wires.pop(peer, None)
        for pending in [pending for pending in self._pending if pending.peer == peer]:
            pending.drop()

    async def close(self) -> None:
        for peer in list(self._wires):
            await self.forget(peer)
