"""The server's calls to the controller: they keep the cluster alive, and keep what a restarted controller must know.

Knows no gateway and waits for nobody but the controller: whatever else hangs, the cluster lives.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.control.changes import Memory, ServerReport
from cluster.control.supervised import Failures, supervised
from cluster.runtime.errors import NoAnswer, WorkerGone
from cluster.runtime.interface import ServiceHandle
from diptych.watchdog import Watchdog

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 2.0
KEEP_ALIVE_GRACE_S = 3.0  # for the answer: several calls fit into ORPHAN_AFTER_S
CONTROLLER_HUNG_S = 10.0  # without an answer; gateways and workers go on meanwhile
ORPHAN_AFTER_S = 20.0  # a cluster whose server vanished without a word stops by itself, and a server without a cluster


class KeepAlive:
    """Owned by the server. `report` goes to the controller. `replace` has it killed and started again when
    it hangs; `gone` is called when it is gone for good.
    """

    def __init__(
        self,
        controller: ServiceHandle,
        report: Callable[[], ServerReport],
        gone: Callable[[], object],
        replace: Callable[[ServiceHandle], Awaitable[ServiceHandle]],
        failures: Failures,
    ) -> None:
        self._controller = controller
        self._replace = replace
        self._silent_s = 0.0
        self._is_replaced = False  # since it last answered
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
        except NoAnswer:
            self._silent_s += timeout_s
            logger.warning("the controller has not answered for %.0f s", self._silent_s)
            if self._silent_s >= CONTROLLER_HUNG_S and not self._is_replaced:
                await self._replace_controller()
        except WorkerGone as error:
            logger.warning("the controller does not answer: %s", error)
            await asyncio.sleep(KEEP_ALIVE_S)
        except Exception:  # an answer too, if a wrong one: the controller lives
            self._silence.reset()
            raise
        else:
            self._silent_s, self._is_replaced = 0.0, False
            self._silence.reset()

    async def _replace_controller(self) -> None:
        """Once for each silence: the new one has all of ORPHAN_AFTER_S to answer."""
        logger.error("the controller hangs, and is killed and started again")
        self._is_replaced = True
        self._silence.reset()
        self._controller = await self._replace(self._controller)

    def _give_up(self) -> None:
        logger.error("the controller has not answered for %.0f s and is gone", ORPHAN_AFTER_S)
        self._gone()
