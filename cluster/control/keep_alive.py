"""The server's keep-alive calls to the controller, and the state that it stores for a restarted controller.

Waits only for the controller, so that no other process that hangs can stop the cluster. Knows no gateway.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.control.changes import ControllerState, ServerReport
from cluster.control.supervised import Failures, supervised
from cluster.runtime.interface import ServiceHandle
from cluster.runtime.runtime_errors import NoAnswer, WorkerGone
from diptych.watchdog import Watchdog

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 2.0
KEEP_ALIVE_GRACE_S = 3.0  # for the answer; several calls fit into ORPHAN_AFTER_S
CONTROLLER_HUNG_S = 10.0  # without an answer; gateways and workers continue meanwhile
ORPHAN_AFTER_S = 20.0  # server and controller each stop if the other one is silent for this long


class KeepAlive:
    """Owned by the server. Sends `report()` to the controller. `replace` restarts a controller that hangs; `gone` is
    called when the controller is lost for good.
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
        self._saved: ControllerState | None = None
        self._silence = Watchdog(ORPHAN_AFTER_S, self._give_up)
        work = supervised("calling the controller", self._call, failures, max_pause_s=KEEP_ALIVE_S)
        self._task = asyncio.ensure_future(work)

    def close(self) -> None:
        self._task.cancel()
        self._silence.close()

    async def _call(self) -> None:
        known = self._saved.revision if self._saved is not None else 0
        timeout_s = KEEP_ALIVE_S + KEEP_ALIVE_GRACE_S
        try:
            answer: ControllerState | None = await self._controller.call(
                "keep_alive", known, KEEP_ALIVE_S, self._report(), timeout_s=timeout_s
            )
            if answer is None:
                logger.warning("the controller was restarted")
                await self._controller.call("begin", self._saved)
            self._saved = answer or self._saved
        except NoAnswer:
            self._silent_s += timeout_s
            logger.warning("the controller has not answered for %.0f s", self._silent_s)
            if self._silent_s >= CONTROLLER_HUNG_S and not self._is_replaced:
                await self._replace_controller()
        except WorkerGone as error:
            logger.warning("the controller does not answer: %s", error)
            await asyncio.sleep(KEEP_ALIVE_S)
        except Exception:  # raised by the controller, so it is alive
            self._silence.reset()
            raise
        else:
            self._silent_s, self._is_replaced = 0.0, False
            self._silence.reset()

    async def _replace_controller(self) -> None:
        """Only once per silence; the new controller has `ORPHAN_AFTER_S` to answer."""
        logger.error("the controller hangs and is restarted")
        self._is_replaced = True
        self._silence.reset()
        self._controller = await self._replace(self._controller)

    def _give_up(self) -> None:
        logger.error("the controller has not answered for %.0f s and is gone", ORPHAN_AFTER_S)
        self._gone()
