"""Whether the device of a slab still works."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_IO_FAILURES = 3  # in a row: the device is at fault


class DeviceHealth:
    """Stops the use of a device that fails several times in a row. `what`: reads or writes of which folder."""

    def __init__(self, what: str, on_stop: Callable[[], None] = lambda: None) -> None:
        self.what = what
        self._on_stop = on_stop
        self._in_a_row = 0
        self.good = self.failures = 0
        self.stopped = ""

    def succeeded(self) -> None:
        self.good += 1
        self._in_a_row = 0

    def failed(self, why: str) -> None:
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_IO_FAILURES and not self.stopped:
            self.stopped = why
            logger.error("%s failed %d times in a row (%s): stopped until a restart", self.what, self._in_a_row, why)
            self._on_stop()
