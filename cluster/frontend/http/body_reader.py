"""Reads request bodies with limits: size and time of each, memory of all together and per client address.

Knows ASGI; knows no request.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Receive, Scope

from cluster.frontend.http.failures import Failure

MAX_BODY_BYTES = 16 << 20
JSON_BYTES = 6  # most bytes of JSON per byte of a prompt: \u0000
FIELDS_BYTES = 1 << 20  # of a body without its prompt
# Paths of bodies with one prompt; others may have several.
ONE_PROMPT = {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"}
BODY_S = 60.0
FREE_BYTES = 64 << 10  # of each body, not counted, so that large bodies cannot crowd out small ones
MAX_UNREAD_BYTES = 256 << 20  # of all bodies that have not arrived completely
MAX_UNREAD_BYTES_PER_ADDRESS = 64 << 20
RETRY_AFTER_S = 1.0

TOO_LARGE = Failure(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB; send less", "body_too_large")
TOO_SLOW = Failure(408, f"the body did not arrive within {BODY_S:.0f} s", "body_too_slow")
CROWDED = Failure(
    429, "too many large bodies arrive at this gateway at once; try again", "no_room", retry_after_s=RETRY_AFTER_S
)


@dataclass(frozen=True, slots=True)
class _Limit:
    max_bytes: int
    failure: Failure  # of a larger body


def _one_prompt_limit(longest_text_bytes: int | None, context_length: int) -> _Limit:
    if longest_text_bytes is None or JSON_BYTES * longest_text_bytes + FIELDS_BYTES >= MAX_BODY_BYTES:
        return _Limit(MAX_BODY_BYTES, TOO_LARGE)
    limit = JSON_BYTES * longest_text_bytes + FIELDS_BYTES
    why = f"This model's maximum context length is {context_length} tokens; a body of {limit} bytes or more cannot fit"
    return _Limit(limit, Failure(400, f"{why}; shorten it", "context_length_exceeded"))


class BodyReader:
    """Owned by its `Connection`.

    `models`: of each, the bytes of the longest text that can fit into its context (None: unknown), and the tokens of
    that. The largest limit holds, since the model is only known when the body is read.
    """

    def __init__(self, models: Iterable[tuple[int | None, int]]) -> None:
        self._one_prompt = max((_one_prompt_limit(*each) for each in models), key=lambda limit: limit.max_bytes)
        self._unread: Counter[str] = Counter()

    async def read(self, scope: Scope, receive: Receive) -> bytes | Failure | None:
        """The whole body, or the error; None if the client disconnected first."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        limit = self._one_prompt if scope["path"] in ONE_PROMPT else _Limit(MAX_BODY_BYTES, TOO_LARGE)
        if int(declared) > limit.max_bytes:  # h11 checks that it is a number
            return limit.failure
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(scope["client"][0] if scope["client"] else "", receive, limit)
        except TimeoutError:
            return TOO_SLOW

    async def _read(self, host: str, receive: Receive, limit: _Limit) -> bytes | Failure | None:
        body, counted = bytearray(), 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > limit.max_bytes:
                    return limit.failure
                if not message.get("more_body", False):
                    return bytes(body)
                more = max(len(body) - FREE_BYTES, 0) - counted
                self._unread[host] += more
                counted += more
                if more and self._is_crowded(host):
                    return CROWDED
        finally:
            self._unread[host] -= counted
            if not self._unread[host]:
                del self._unread[host]

    def _is_crowded(self, host: str) -> bool:
        return self._unread[host] > MAX_UNREAD_BYTES_PER_ADDRESS or self._unread.total() > MAX_UNREAD_BYTES
