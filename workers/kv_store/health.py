"""What a device or a server that stores KV blocks did, and whether it is used: not after several failures in a row."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # in a row: the device or the server is at fault
PROBE_PAUSE_S = 5.0  # until the first probe; then twice as long each time
MAX_PROBE_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class KVStoreStats:
    """`num_stored`: in its own slab, or known to be on the server. `num_slots`: of the slab. `reads` and `writes`
    succeeded; `reads` has those of peers. `late`: past their deadline. `stopped_*`: why the device, the server, or a
    peer's slab, is no longer used.
    """

    num_stored: int
    num_slots: int = 0
    recovered: int = 0
    is_direct: bool = False
    reads: int = 0
    peer_reads: int = 0
    read_failures: int = 0
    corrupt: int = 0
    writes: int = 0
    write_failures: int = 0
    writes_dropped: int = 0
    late: int = 0
    stopped_reads: str = ""
    stopped_writes: str = ""
    stopped_peers: str = ""

    @property
    def problem(self) -> str:
        """What is stopped, and why."""
        whys = {
            "reads stopped": self.stopped_reads,
            "writes stopped": self.stopped_writes,
            "a peer's slab": self.stopped_peers,
        }
        return "; ".join(f"{what}: {why}" for what, why in whys.items() if why)


class StoreHealth:
    """The health of `what`, reads or writes. Owned by a store, which closes it. `on_stop` is called when they stop.

    `probe` asks again after a pause, on a thread, and reports `succeeded` or `failed`; no request waits for it. Without
    one they stay stopped. `answers`: what has succeeded.
    """

    def __init__(
        self, what: str, on_stop: Callable[[], None] = lambda: None, probe: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        self._on_stop = on_stop
        self._probe = probe
        self._in_a_row = 0
        self._pause_s = PROBE_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        self.answers = self.failures = 0
        self.stopped = ""

    def succeeded(self) -> None:
        self.answers += 1
        self._in_a_row = 0
        if self.stopped and self._probe:
            logger.warning("%s work again", self.what)
            self.close()
            self.stopped, self._pause_s = "", PROBE_PAUSE_S

    def failed(self, why: str) -> None:
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_FAILURES or self.stopped:
            self.stop(why)

    def stop(self, why: str) -> None:
        """Use it no more until a probe succeeds, if there are any."""
        if self.stopped and not self._probe:
            return
        if not self.stopped:
            until = f"the next try is in {self._pause_s:.0f} s" if self._probe else "until a restart"
            logger.error("%s are stopped: %s; %s", self.what, why, until)
        self.stopped = why
        self._on_stop()
        if self._probe and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._retry, self._probe)
            self._pause_s = min(2 * self._pause_s, MAX_PROBE_PAUSE_S)

    def _retry(self, probe: Callable[[], None]) -> None:
        self._timer = None
        probe()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
