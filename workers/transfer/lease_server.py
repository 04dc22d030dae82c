"""Serves the readers of a worker's leases: the `LeaseSource` port of kvtransfer.control over an engine's leases.

Knows leases and the loop's clock; knows no sequence and no KV byte.
"""

import asyncio
from collections.abc import Callable

from kvtransfer.control import ControlServer
from kvtransfer.digest import watch_reply
from kvtransfer.ticket import PeerAddress, Piece, Progress
from workers.config import WorkerConfig
from workers.engine.executor import Executor
from workers.engine.leases import LeaseManager


class LeaseServer:
    """Owned by a Worker. `address` is its current peer address; `released` is called after a release.

    `wake` is called when a reader waits: the engine may have blocks to digest for it. `lender` serves borrowers.
    """

    def __init__(
        self,
        config: WorkerConfig,
        leases: Callable[[], LeaseManager],
        executor: Executor,
        address: Callable[[], PeerAddress],
        released: Callable[[], None],
        wake: Callable[[], None],
        lender: object,
    ) -> None:
        self._leases = leases
        self._host = config.transfer.host
        self._layouts = [shard.layout for shard in executor.shards()]
        self._released = released
        self._wake = wake
        self._progressed = asyncio.Event()
        self._num_waiting = 0
        self._control = ControlServer(
            self, address, config.secret.encode(), max_readers=config.transfer.max_readers, lender=lender
        )
        self._port: int | None = None

    async def listen(self) -> None:
        """Start to accept readers. Raises OSError."""
        self._port = await self._control.start(self._host)

    @property
    def port(self) -> int:
        assert self._port is not None, "call listen first"
        return self._port

    async def close(self) -> None:
        """Disconnect all readers; their leases end with the engine."""
        await self._control.close()

    def progressed(self) -> None:
        """Watermarks may have moved: wake waiting readers."""
        if self._num_waiting:
            self._progressed.set()
            self._progressed = asyncio.Event()

    async def watch(
        self, lease: str, epoch: int, have_blocks: int, timeout_s: float, pieces: tuple[Piece, ...]
    ) -> Progress:
        """Extend the lease; return when more than `have_blocks` are ready or all are, at the latest at the timeout.

        The result has digests for `pieces`. Raises `LeaseLost`, and `PeerRefused` when no rank holds one of them.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        has_waited = False
        while True:
            progressed = self._progressed
            mark = self._leases().progress(lease, epoch, have_blocks, loop.time())
            if mark.ready_blocks > have_blocks or mark.finished or loop.time() >= deadline_s:
                return watch_reply(
                    mark.cells,
                    self._layouts,
                    pieces,
                    mark.first_block,
                    mark.ready_blocks,
                    finished=mark.finished,
                    ttl_s=mark.ttl_s,
                )
            if not has_waited:
                has_waited = True
                self._wake()
            self._num_waiting += 1
            try:
                async with asyncio.timeout_at(deadline_s):
                    await progressed.wait()
            except TimeoutError:
                continue  # the next iteration returns the present watermark
            finally:
                self._num_waiting -= 1

    def release(self, lease: str, epoch: int) -> None:
        """The reader has all KV. Raises `LeaseLost`."""
        self._leases().release(lease, epoch)
        self._released()
