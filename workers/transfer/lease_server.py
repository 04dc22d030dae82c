"""Answers the readers of a worker's leases: the `LeaseSource` port of kvtransfer.control over an engine.

Knows leases and the loop's clock; knows no socket.
"""

import asyncio
from collections.abc import Callable, Sequence

from kvtransfer.digest import answer
from kvtransfer.layout import KVLayout
from kvtransfer.ticket import Piece, Progress
from workers.engine.leases import LeaseBook


class LeaseDesk:
    """Owned by a Worker. `layouts` are those of its ranks; `released` is called after a lease has ended."""

    def __init__(self, leases: LeaseBook, layouts: Sequence[KVLayout], released: Callable[[], None]) -> None:
        self._leases = leases
        self._layouts = layouts
        self._released = released
        self._progressed = asyncio.Event()
        self._num_waiting = 0

    def progressed(self) -> None:
        """Watermarks may have moved: wake the readers."""
        if self._num_waiting:
            self._progressed.set()
            self._progressed = asyncio.Event()

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress:
        """Answer when the watermark passed `have_blocks`, or the prompt is done, or after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            progressed = self._progressed
            mark = self._leases.progress(lease, epoch, have_blocks, loop.time())
            if mark.ready_blocks > have_blocks or mark.finished or loop.time() >= deadline_s:
                return answer(
                    mark.cells,
                    self._layouts,
                    pieces,
                    mark.first_block,
                    mark.ready_blocks,
                    finished=mark.finished,
                    ttl_s=mark.ttl_s,
                )
            self._num_waiting += 1
            try:
                async with asyncio.timeout_at(deadline_s):
                    await progressed.wait()
            except TimeoutError:
                continue  # the deadline is over: the next round answers with what there is
            finally:
                self._num_waiting -= 1

    def release(self, lease: str, epoch: int) -> None:
        """The reader has everything. Raises `LeaseLost`."""
        self._leases.release(lease, epoch)
        self._released()
