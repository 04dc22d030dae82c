"""Supervision: background tasks that survive exceptions, and what the server does for its gateways and controller.

One manager and one task per gateway, so that no gateway waits for another. The calls to the controller wait for nothing
else, so that no other process that hangs can stop the cluster.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.control.changes import ControllerState, ServerReport
from cluster.runtime.interface import Runtime, ServiceHandle
from cluster.runtime.runtime_errors import NoAnswer, WorkerGone
from diptych.view import GatewayState, GatewayView
from diptych.watchdog import Watchdog

logger = logging.getLogger(__name__)

PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
POLL_S = 2.0  # between two polls
ANSWER_S = 5.0  # timeout of a poll of an open gateway
HUNG_S = 30.0  # without an answer; longer than a large prompt or a live migration of its machine delays it
OPEN_S = 120.0  # for its servers to open; its process may start slowly
KEEP_ALIVE_S = 2.0
KEEP_ALIVE_GRACE_S = 3.0  # for the answer; several calls fit into ORPHAN_AFTER_S
CONTROLLER_HUNG_S = 10.0  # without an answer; gateways and workers continue meanwhile
ORPHAN_AFTER_S = 20.0  # server and controller each stop if the other one is silent for this long


class Failures:
    """How often each background task of a process failed. `changed` is called after each failure."""

    def __init__(self, changed: Callable[[], object] = lambda: None) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = changed

    def count(self, task: str) -> None:
        self._counts[task] += 1
        self._changed()

    def counts(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(self._counts.items()))


async def supervised(
    task: str,
    work: Callable[[], Awaitable[None]],
    failures: Failures,
    *,
    pause_s: float = PAUSE_S,
    max_pause_s: float = MAX_PAUSE_S,
) -> None:
    """Call `work` in a loop until cancelled. `work` itself waits until it has something to do.

    Pauses for `pause_s` after an exception, and twice as long after each further one in a row, at most `max_pause_s`.
    A call that returns, or that ran for longer than `max_pause_s`, resets the pause.
    """
    clock = asyncio.get_running_loop().time
    in_a_row = 0
    while True:
        begun_s = clock()
        try:
            await work()
            in_a_row = 0
        except Exception as error:
            in_a_row = 0 if clock() - begun_s > max_pause_s else in_a_row
            wait_s = min(max_pause_s, pause_s * 2 ** min(in_a_row, 30))
            in_a_row += 1
            logger.exception("%s failed (%s); it continues in %.0f s", task, type(error).__name__, wait_s)
            failures.count(task)
            await asyncio.sleep(wait_s)


class GatewayManager:
    """Supervises one gateway process: polls it, publishes its state, replaces it when it hangs. Owned by the server.

        STARTING ──servers are open────> OPEN ──no answer for ANSWER_S──> SILENT ──none for HUNG_S──> killed ─┐
           ^                              │ └<───────it answers─────────────┘                                 │
           └───────its process died───────┴───────────────────────────────────────────────────────────────────┘

    `opening`: the arguments of the gateway's `open`, which it gets again after a restart.
    """

    def __init__(
        self, name: str, handle: ServiceHandle, opening: tuple[Any, ...], runtime: Runtime, failures: Failures
    ) -> None:
        self.handle = handle
        self.view = GatewayView(name, GatewayState.OPEN)
        self._opening = opening
        self._runtime = runtime
        self._failures = failures
        self._silent_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        work = supervised(f"supervising {self.view.name}", self._poll, self._failures, pause_s=POLL_S)
        self._task = asyncio.ensure_future(work)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _poll(self) -> None:
        """Poll once, and act on the answer. Raises the error if its servers cannot open."""
        is_open = self.view.state is not GatewayState.STARTING
        limit_s = ANSWER_S if is_open else OPEN_S
        try:
            await self.handle.call("open", *self._opening, timeout_s=limit_s)
        except NoAnswer:
            self._silent_s += limit_s
            if self._silent_s >= HUNG_S:
                await self._replace()
            elif self.view.state is GatewayState.OPEN:
                logger.warning("%s does not answer; it is replaced after %.0f s", self.view.name, HUNG_S)
                detail = f"no answer for {limit_s:.0f} s; replaced after {HUNG_S:.0f} s"
                self._show(GatewayState.SILENT, detail, silences=1)
            return
        except WorkerGone as error:
            self._silent_s = 0.0
            if is_open:
                logger.warning("%s died and is restarted: %s", self.view.name, error)
                self._show(GatewayState.STARTING, str(error), restarts=1)
        except Exception as error:
            self._silent_s = 0.0
            self._show(GatewayState.STARTING, f"cannot open its servers: {type(error).__name__}: {error}")
            raise
        else:
            self._silent_s = 0.0
            if self.view.state is not GatewayState.OPEN:
                logger.warning("%s answers again", self.view.name)
                self._show(GatewayState.OPEN, "")
        await asyncio.sleep(POLL_S)

    async def _replace(self) -> None:
        """Restart it. Its streams end, and clients retry at another gateway, or here once it has restarted."""
        logger.error("%s has not answered for %.0f s and is replaced", self.view.name, self._silent_s)
        detail = f"no answer for {self._silent_s:.0f} s; it is restarted"
        self._silent_s = 0.0
        self._show(GatewayState.STARTING, detail, restarts=1)
        self.handle = await self._runtime.restart_service(self.handle)

    def _show(self, state: GatewayState, detail: str, *, restarts: int = 0, silences: int = 0) -> None:
        """`restarts` and `silences` are added to the counts."""
        before = self.view
        self.view = GatewayView(before.name, state, before.restarts + restarts, before.silences + silences, detail)


class KeepAlive:
    """The server's keep-alive calls to the controller, and the state that it stores for a restarted controller.

    Owned by the server. Sends `report()` to the controller. `replace` restarts a controller that hangs; `gone` is
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
                await self._controller.call("start", self._saved)
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
