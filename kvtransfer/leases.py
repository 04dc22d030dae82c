"""Leases in memory: a `LeaseSource` for tests and examples, driven by hand.

It has no clock: a lease ends when somebody releases it, or when its owner says that it expired.
"""

import asyncio
from dataclasses import dataclass, field

from kvtransfer.errors import LeaseLost
from kvtransfer.ticket import Progress


@dataclass(slots=True)
class _Lease:
    epoch: int
    ttl_s: float
    digests: list[list[int]]  # [shard][block]
    ready_blocks: int = 0
    finished: bool = False
    heartbeats: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryLeases:
    """`LeaseSource` whose watermark the test moves."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self.released: list[str] = []

    def grant(self, lease: str, *, epoch: int = 1, ttl_s: float = 30.0, num_shards: int = 1) -> None:
        self._leases[lease] = _Lease(epoch, ttl_s, [[] for _ in range(num_shards)])

    def advance(self, lease: str, digests: tuple[tuple[int, ...], ...] | None, num_blocks: int = 0) -> None:
        """More blocks are ready: `digests[shard]` of each of them, or None and their number for unchecked ones."""
        held = self._leases[lease]
        if digests is None:
            held.digests = []
            held.ready_blocks += num_blocks
        else:
            for shard, fresh in zip(held.digests, digests, strict=True):
                shard.extend(fresh)
            held.ready_blocks = len(held.digests[0])
        self._wake(held)

    def finish(self, lease: str) -> None:
        self._leases[lease].finished = True
        self._wake(self._leases[lease])

    def expire(self, lease: str) -> None:
        """The deadline passed: watchers and the later release meet `LeaseLost`."""
        self._wake(self._leases.pop(lease))

    def heartbeats(self, lease: str) -> int:
        return self._leases[lease].heartbeats

    async def watch(self, lease: str, epoch: int, have_blocks: int, timeout_s: float) -> Progress:
        held = self._valid(lease, epoch)
        held.heartbeats += 1
        try:
            async with asyncio.timeout(timeout_s):
                while held.ready_blocks <= have_blocks and not held.finished:
                    await held.changed.wait()
                    self._valid(lease, epoch)
        except TimeoutError:
            pass  # nothing new: say so
        first = min(have_blocks, held.ready_blocks)
        digests = tuple(tuple(shard[first:]) for shard in held.digests)
        return Progress(held.ready_blocks, first, digests, held.finished, held.ttl_s)

    def release(self, lease: str, epoch: int) -> None:
        self._valid(lease, epoch)
        del self._leases[lease]
        self.released.append(lease)

    def _valid(self, lease: str, epoch: int) -> _Lease:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseLost(f"lease {lease} expired or was released: compute the prompt again")
        if held.epoch != epoch:
            raise LeaseLost(f"lease {lease} is at epoch {held.epoch}, not {epoch}: another reader took over")
        return held

    def _wake(self, held: _Lease) -> None:
        """Wake all who wait now; whoever waits later waits for the next change."""
        held.changed.set()
        held.changed = asyncio.Event()
