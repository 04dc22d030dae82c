"""What a kubelet asks: /health, whether rounds still end, and /ready, whether the last one reached all it had to."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from cluster.control.autoscaler.loop import MOST_WAIT_S, Autoscaler

STUCK_S = 2 * MOST_WAIT_S


@asynccontextmanager
async def probed(autoscaler: Autoscaler, port: int) -> AsyncIterator[None]:
    """Answers on all addresses."""

    async def health(_: web.Request) -> web.Response:
        silent_s = time.monotonic() - autoscaler.looked_s
        return _said(f"no round has ended for {silent_s:.0f} s" if silent_s > STUCK_S else "")

    async def ready(_: web.Request) -> web.Response:
        return _said("no round has ended yet" if autoscaler.trouble is None else autoscaler.trouble)

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/ready", ready)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


def _said(trouble: str) -> web.Response:
    return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")
