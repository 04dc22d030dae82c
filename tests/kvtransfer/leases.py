"""Leases in memory: a `LeaseSource` that a test drives by hand.

It has no clock: a lease ends when a reader releases it, or when the test expires it.
"""

import asyncio
from dataclasses import dataclass, field

from kvtransfer.digest import watch_reply
from kvtransfer.errors import LeaseLost
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece, Progress


@dataclass(slots=True)
class _Lease:
    epoch: int
    ttl_s: float
    cells: list[list[bytes]]  # [rank][block]
    ready_blocks: int = 0
    finished: bool = False
    heartbeats: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryLeases:
    """`LeaseSource` whose watermark the test moves. `layouts` are those of the owner's ranks."""

    def __init__(self, *layouts: KVLayout) -> None:
        self._layouts = layouts
        self._leases: dict[str, _Lease] = {}
        self.released: list[str] = []

    def grant(self, lease: str, *, epoch: int = 1, ttl_s: float = 30.0) -> None:
        self._leases[lease] = _Lease(epoch, ttl_s, [[] for _ in self._layouts])

    def advance(self, lease: str, *cells: tuple[bytes, ...], num_blocks: int = 0) -> None:
        """More blocks are ready: on each rank their cells' digests, or just their number for unchecked ones."""
        held = self._leases[lease]
        if not cells:
            held.cells = []
            held.ready_blocks += num_blocks
        else:
            for rank, fresh in zip(held.cells, cells, strict=True):
                rank.extend(fresh)
            held.ready_blocks = len(held.cells[0])
        self._wake(held)

    def finish(self, lease: str) -> None:
        self._leases[lease].finished = True
        self._wake(self._leases[lease])

    def expire(self, lease: str) -> None:
        """The deadline passed: watchers and the later release meet `LeaseLost`."""
        self._wake(self._leases.pop(lease))

    def heartbeats(self, lease: str) -> int:
        return self._leases[lease].heartbeats

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress:
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
        cells, ready = [rank[first:] for rank in held.cells], held.ready_blocks
        return watch_reply(cells, self._layouts, pieces, first, ready, finished=held.finished, ttl_s=held.ttl_s)

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
        """Wake all current waiters; later waiters wait for the next change."""
        held.changed.set()
        held.changed = asyncio.Event()
