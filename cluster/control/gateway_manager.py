"""Supervises one gateway process: polls it, publishes its state, and replaces it when it hangs.

    STARTING ──servers are open────> OPEN ──no answer for ANSWER_S──> SILENT ──none for HUNG_S──> killed ─┐
       ^                              │ └<───────it answers─────────────┘                                 │
       └───────its process died───────┴───────────────────────────────────────────────────────────────────┘

One manager and one task per gateway, so that no gateway waits for another.
"""

import asyncio
import logging
from typing import Any

from cluster.control.supervised import Failures, supervised
from cluster.runtime.interface import Runtime, ServiceHandle
from cluster.runtime.runtime_errors import NoAnswer, WorkerGone
from diptych.view import GatewayState, GatewayView

logger = logging.getLogger(__name__)

POLL_S = 2.0  # between two polls
ANSWER_S = 5.0  # timeout of a poll of an open gateway
HUNG_S = 30.0  # without an answer; longer than a large prompt or a live migration of its machine delays it
OPEN_S = 120.0  # for its servers to open; its process may start slowly


class GatewayManager:
    """Owned by the server. `opening`: the arguments of the gateway's `open`, which it gets again after a restart."""

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

    def begin(self) -> None:
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
