"""Whether a server of KV blocks is used: not after several failures in a row, and again once it answers a probe."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_SERVER_FAILURES = 3  # in a row: the server is at fault
PROBE_PAUSE_S = 5.0  # until the first probe; then twice as long each time
MAX_PROBE_PAUSE_S = 60.0


class ServerHealth:
    """Owned by a RemoteStore, for `what`: its reads or its writes. No request waits for a probe.

    `probe` asks the server and reports `succeeded` or `failed`.
    """

    def __init__(self, what: str, probe: Callable[[], None], on_stop: Callable[[], None] = lambda: None) -> None:
        self._what = what
        self._probe = probe
        self._on_stop = on_stop
        self._in_a_row = 0
        self._pause_s = PROBE_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        self.good = self.failures = 0
        self.stopped = ""

    def succeeded(self) -> None:
        self.good += 1
        self._in_a_row = 0
        if self.stopped:
            logger.warning("%s work again", self._what)
            self.close()
            self.stopped, self._pause_s = "", PROBE_PAUSE_S

    def failed(self, why: str) -> None:
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_SERVER_FAILURES or self.stopped:
            self.stop(why)

    def stop(self, why: str) -> None:
        """Use it no more until it answers a probe."""
        if not self.stopped:
            logger.error("%s are stopped: %s; the next try is in %.0f s", self._what, why, self._pause_s)
        self.stopped = why
        self._on_stop()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._retry)
            self._pause_s = min(2 * self._pause_s, MAX_PROBE_PAUSE_S)

    def _retry(self) -> None:
        self._timer = None
        self._probe()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
