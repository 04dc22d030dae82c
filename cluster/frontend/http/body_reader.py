"""Reads request bodies, within limits of size and time for each, and of memory for all and for each client address.

Knows ASGI; knows no request.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.types import Receive, Scope

from cluster.frontend.http.failures import Failure

MOST_BYTES = 16 << 20
JSON_BYTES = 6  # the most that a byte of a prompt takes, as \u0000 does
FIELDS_BYTES = 1 << 20  # of a body without its prompt
ONE_PROMPT = frozenset({"/v1/chat/completions", "/tokenize"})  # other bodies may have many
BODY_S = 60.0
FREE_BYTES = 64 << 10  # of each body, not counted, so that large bodies keep no small one out
MOST_UNREAD_BYTES = 256 << 20  # of all bodies that have not arrived completely
MOST_UNREAD_BYTES_OF_ONE = 64 << 20  # of one address
RETRY_AFTER_S = 1.0

TOO_LARGE = Failure(413, f"the body has more than {MOST_BYTES >> 20} MiB; send less", "body_too_large")
TOO_SLOW = Failure(408, f"the body did not arrive within {BODY_S:.0f} s", "body_too_slow")
CROWDED = Failure(
    429, "too many large bodies arrive at this gateway at once; try again", "no_room", retry_after_s=RETRY_AFTER_S
)


@dataclass(frozen=True, slots=True)
class _Limit:
    most_bytes: int
    failure: Failure  # of a larger body


def _one_prompt_limit(longest_text_bytes: int | None, context_length: int) -> _Limit:
    if longest_text_bytes is None or JSON_BYTES * longest_text_bytes + FIELDS_BYTES >= MOST_BYTES:
        return _Limit(MOST_BYTES, TOO_LARGE)
    most = JSON_BYTES * longest_text_bytes + FIELDS_BYTES
    why = f"This model's maximum context length is {context_length} tokens; a body of {most} bytes or more cannot fit"
    return _Limit(most, Failure(400, f"{why}; shorten it", "context_length_exceeded"))


class BodyReader:
    """Owned by its `Connection`.

    A prompt of more than `longest_text_bytes` cannot fit into `context_length` tokens; None: there is no such bound.
    """

    def __init__(self, longest_text_bytes: int | None, context_length: int) -> None:
        self._one_prompt = _one_prompt_limit(longest_text_bytes, context_length)
        self._unread: Counter[str] = Counter()

    async def read(self, scope: Scope, receive: Receive) -> bytes | Failure | None:
        """The whole body, or why it is refused; None if the client left before its end."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        limit = self._one_prompt if scope["path"] in ONE_PROMPT else _Limit(MOST_BYTES, TOO_LARGE)
        if int(declared) > limit.most_bytes:  # h11 has checked that it is a number
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
                if len(body) > limit.most_bytes:
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
        return self._unread[host] > MOST_UNREAD_BYTES_OF_ONE or self._unread.total() > MOST_UNREAD_BYTES
