"""The routes of the web page. Its files have no data and need no key; `/ui/status` needs one if keys are configured."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from cluster.frontend.http.failures import JSON
from cluster.frontend.http.openapi import route_options
from cluster.frontend.http.ui.status import status
from cluster.frontend.served_models import ServedModels
from cluster.observe.ledger import now_ns

STATUS = "/ui/status"
FILES = {
    "/ui": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
# Only the page's own files, nothing inline, no framing. `data:` is the empty icon.
POLICY = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
FRESH_S = 0.5  # shortest time between two builds of the status, however many pages poll


def add_ui(app: FastAPI, models: ServedModels) -> None:
    for path, (name, kind) in FILES.items():
        content = files(__package__).joinpath(name).read_bytes()
        app.add_api_route(path, _sender(content, kind), include_in_schema=False)
    app.add_api_route(STATUS, Snapshots(partial(status, models)).answer, **route_options(STATUS, "GET"))


def _sender(content: bytes, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send


class Snapshots:
    """The latest status, rebuilt on request if it is older than `FRESH_S`."""

    def __init__(self, build: Callable[[int], dict[str, Any]]) -> None:
        self._build = build
        self._content = b""
        self._until_s = 0.0

    async def answer(self) -> Response:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._until_s:
            self._content = json.dumps(self._build(now_ns()), ensure_ascii=False).encode()
            self._until_s = now_s + FRESH_S
        return Response(self._content, media_type=JSON, headers={"cache-control": "no-store"})
