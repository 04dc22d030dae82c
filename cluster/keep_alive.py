"""The server's calls to the controller: they keep the cluster alive, and keep what a restarted controller must know.

Knows no gateway and waits for nobody but the controller: whatever else hangs, the cluster lives.
"""

import asyncio
import logging
from collections.abc import Callable

from cluster.changes import Memory, ServerReport
from cluster.runtime.interface import ServiceHandle, WorkerGone
from cluster.supervised import Failures, supervised
from kvtransfer.watchdog import Watchdog

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 2.0
KEEP_ALIVE_GRACE_S = 3.0  # for the answer: several calls fit into ORPHAN_AFTER_S
ORPHAN_AFTER_S = 20.0  # a cluster whose server vanished without a word stops by itself, and a server without a cluster


class KeepAlive:
    """Owned by whoever serves. `report` is what the controller is told; `gone` is called when it is gone for good."""

    def __init__(
        self,
        controller: ServiceHandle,
        report: Callable[[], ServerReport],
        gone: Callable[[], object],
        failures: Failures,
    ) -> None:
        self._controller = controller
        self._report = report
        self._gone = gone
        self._memory: Memory | None = None
        self._silence = Watchdog(ORPHAN_AFTER_S, self._give_up)
        work = supervised("calling the controller", self._call, failures, most_pause_s=KEEP_ALIVE_S)
        self._task = asyncio.ensure_future(work)

    def close(self) -> None:
        self._task.cancel()
        self._silence.close()

    async def _call(self) -> None:
        known = self._memory.revision if self._memory is not None else 0
        timeout_s = KEEP_ALIVE_S + KEEP_ALIVE_GRACE_S
        try:
            answer: Memory | None = await self._controller.call(
                "keep_alive", known, KEEP_ALIVE_S, self._report(), timeout_s=timeout_s
            )
            if answer is None:
                logger.warning("the controller was restarted")
                await self._controller.call("begin", self._memory)
            self._memory = answer or self._memory
        except WorkerGone as error:
            logger.warning("the controller does not answer: %s", error)
            await asyncio.sleep(KEEP_ALIVE_S)
        except Exception:  # an answer too, if a wrong one: the controller lives
            self._silence.heard()
            raise
        else:
            self._silence.heard()

    def _give_up(self) -> None:
        logger.error("the controller has not answered for %.0f s and is gone", ORPHAN_AFTER_S)
        self._gone()
