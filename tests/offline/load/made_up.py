"""An OpenAI server with a known capacity: `slots` requests at once, each for `service_s`, others wait their turn.

What else it does is set by name: how many tokens a chunk has, what it says about them, and how it fails.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class MadeUp:
    """Settings may be changed while it runs. `bodies`: what was asked; `most`: the most that were here at once."""

    service_s: float = 0.0
    slow_first_s: float = 0.0  # what the first of `bodies` waits more
    slots: int = 1000
    tokens_a_chunk: int = 1
    tells_usage: bool = True
    tells_in_chunks: bool = True
    takes_ids: bool = True
    takes_extras: bool = True
    status: int = 200
    cuts: bool = False
    sends: bytes = b""  # instead of an answer
    key: str = ""
    fails_after: int | None = None  # from so many answers on with 429
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    here: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.slots)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "made-up"}, {"id": "other"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if refusal := self._refusal(body, request):
            return refusal
        self.bodies.append(body)
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            async with self._room:
                return await self._answer(body, request)
        finally:
            self.here -= 1

    def _refusal(self, body: dict[str, Any], request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "no such key")
        if body["model"] != "made-up":
            return _error(404, f"there is no model {body['model']}")
        if self.status != 200:
            return _error(self.status, "as the test wants it")
        if self.fails_after is not None and len(self.bodies) >= self.fails_after:
            return _error(429, "enough")
        if isinstance(body["prompt"], list) and not self.takes_ids:
            return _error(400, "prompt must be a string")
        if "ignore_eos" in body and not self.takes_extras:
            return _error(422, "extra fields not permitted")
        return None

    async def _answer(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.sends:
            await response.write(self.sends)
            return response
        if body is self.bodies[0]:
            await asyncio.sleep(self.slow_first_s)
        wanted = body["max_tokens"]
        prompt = len(body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split())
        chunks = -(-wanted // self.tokens_a_chunk)
        for number in range(chunks):
            await asyncio.sleep(self.service_s / chunks)
            if self.cuts and number == chunks - 1:
                assert request.transport is not None
                request.transport.abort()
                return response
            so_far = min(wanted, (number + 1) * self.tokens_a_chunk)
            usage = {"prompt_tokens": prompt, "completion_tokens": so_far} if self.tells_in_chunks else None
            await _send(response, {"choices": [{"text": "x", "finish_reason": None}], "usage": usage})
        await _send(response, {"choices": [{"text": "", "finish_reason": "length"}], "usage": None})
        if self.tells_usage:
            await _send(response, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": wanted}})
        await response.write(b"data: [DONE]\n\n")
        return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def _send(response: web.StreamResponse, piece: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")


@asynccontextmanager
async def made_up(**settings: Any) -> AsyncIterator[MadeUp]:
    """Open on a free port of the loopback."""
    server = MadeUp(**settings)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
