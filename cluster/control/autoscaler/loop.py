"""The autoscaler loop: reads target numbers of workers from a gateway, and scales the StatefulSets to them.

It logs failures and retries with a growing pause.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from cluster.control.autoscaler.kubernetes import ApiServer, ScaleError, Scales
from cluster.control.autoscaler.pods import Change, Pods
from cluster.spec import SpecError
from diptych.access import Access
from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.view import ClusterView
from workers.log_fields import log_fields

logger = logging.getLogger(__name__)

STATUS_S = 5.0
MAX_WAIT_S = 60.0


class Autoscaler:
    """`access` is called in every round, because keys and certificates rotate. A pool's StatefulSet is PREFIX-POOL.

    `trouble`: the last round's Kubernetes failure; None before the first round. `round_s`: the end of the last round.
    """

    def __init__(
        self, pods: Pods, server: ApiServer, endpoint: str, access: Callable[[], Access], prefix: str, period_s: float
    ) -> None:
        self._pods = pods
        self._server = server
        self._endpoint = endpoint
        self._access = access
        self._prefix = prefix
        self._period_s = period_s
        self._has_targets: bool | None = None  # whether a gateway answered in the last round
        self.trouble: str | None = None
        self.round_s = time.monotonic()

    async def run(self) -> None:
        failed = 0
        while True:
            try:
                self.trouble = await self.round()
            except Exception as error:  # the next round may succeed
                logger.exception("the autoscaler round failed")
                self.trouble = f"{type(error).__name__}: {error}"
            self.round_s = time.monotonic()
            failed = failed + 1 if self.trouble else 0
            await asyncio.sleep(min(self._period_s * 2 ** min(failed, 10), max(self._period_s, MAX_WAIT_S)))

    async def round(self) -> str:
        """Scale every pool to its target. Returns a Kubernetes failure; empty: none."""
        view = await self._view()
        try:
            async with self._server.session() as scales:
                pools = self._pods.pools
                read = await asyncio.gather(*(self._read(scales, pool.name) for pool in pools))
                current = {pool.name: pods for pool, (pods, _) in zip(pools, read, strict=True) if pods is not None}
                changes = self._pods.changes(view, current, time.monotonic())
                failures = [failure for _, failure in read]
                failures += await asyncio.gather(*(self._write(scales, change) for change in changes))
        except ScaleError as error:
            logger.warning("%s", error)
            return str(error)
        return next(filter(None, failures), "")

    async def _view(self) -> ClusterView | None:
        """The gateway's view; None if it does not answer."""
        try:
            async with AsyncClient(self._endpoint, access=self._access()) as client:
                view = (await client.status(timeout_s=STATUS_S)).view
        except (DiptychError, SpecError, OSError) as error:
            if self._has_targets is not False:
                logger.warning("no gateway answers, so nothing shrinks: %s", error)
            self._has_targets = False
            return None
        if not self._has_targets:
            wanted = ", ".join(f"{pool.name} {pool.wanted}" for pool in view.pools)
            logger.info("target numbers of workers from the gateway at %s: %s", self._endpoint, wanted)
        self._has_targets = True
        return view

    async def _read(self, scales: Scales, pool: str) -> tuple[int | None, str]:
        """The number of pods, and the failure."""
        try:
            return await scales.read(self._stateful_set(pool)), ""
        except ScaleError as error:
            logger.warning("%s", error)
            return None, str(error)

    async def _write(self, scales: Scales, change: Change) -> str:
        name, pods = self._stateful_set(change.pool), f"from {change.before} to {change.after} pods"
        try:
            await scales.write(name, change.after)
        except ScaleError as error:
            logger.warning("could not scale %s %s: %s", name, pods, error)
            return str(error)
        facts = log_fields(pool=change.pool, pods=change.after, before=change.before)
        logger.info("scaling %s %s: %s", name, pods, change.why, extra=facts)
        return ""

    def _stateful_set(self, pool: str) -> str:
        return f"{self._prefix}-{pool}"


STUCK_S = 2 * MAX_WAIT_S


@asynccontextmanager
async def probed(autoscaler: Autoscaler, port: int) -> AsyncIterator[None]:
    """Serve liveness and readiness probes on all addresses."""

    async def health(_: web.Request) -> web.Response:
        silent_s = time.monotonic() - autoscaler.round_s
        return _probe_response(f"no round has ended for {silent_s:.0f} s" if silent_s > STUCK_S else "")

    async def ready(_: web.Request) -> web.Response:
        return _probe_response("no round has ended yet" if autoscaler.trouble is None else autoscaler.trouble)

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/ready", ready)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


def _probe_response(trouble: str) -> web.Response:
    return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")
