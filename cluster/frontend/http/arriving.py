"""Bodies on their way: each has a bound of size and time, and all of them, and those of each client address, of memory.

Knows ASGI; knows no request.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.types import Receive, Scope

from cluster.frontend.http.failures import Failure

MOST_BYTES = 16 << 20
JSON_BYTES = 6  # that a byte of a prompt takes at most, as \u0000 does
FIELDS_BYTES = 1 << 20  # of a body beside its prompt
ONE_PROMPT = frozenset({"/v1/chat/completions", "/tokenize"})  # the other bodies may have many
BODY_S = 60.0
FREE_BYTES = 64 << 10  # of each body; they count nowhere, so that large bodies keep no small one out
MOST_UNREAD_BYTES = 256 << 20  # of all bodies that have not arrived whole
MOST_UNREAD_BYTES_OF_ONE = 64 << 20  # of one address
RETRY_AFTER_S = 1.0

TOO_LARGE = Failure(413, f"the body has more than {MOST_BYTES >> 20} MiB; send less", "body_too_large")
TOO_SLOW = Failure(408, f"the body did not arrive within {BODY_S:.0f} s", "body_too_slow")
CROWDED = Failure(
    429, "too many large bodies arrive at this gateway at once; try again", "no_room", retry_after_s=RETRY_AFTER_S
)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The limit of a body, and the error beyond it."""

    most_bytes: int
    refusal: Failure


def _bound_of_one_prompt(longest_text_bytes: int | None, context_length: int) -> _Bound:
    if longest_text_bytes is None or JSON_BYTES * longest_text_bytes + FIELDS_BYTES >= MOST_BYTES:
        return _Bound(MOST_BYTES, TOO_LARGE)
    most = JSON_BYTES * longest_text_bytes + FIELDS_BYTES
    words = f"This model's maximum context length is {context_length} tokens; a body of {most} bytes or more cannot fit"
    return _Bound(most, Failure(400, f"{words}; shorten it", "context_length_exceeded"))


class Arriving:
    """Reads bodies. Owned by its `Connection`.

    A prompt of more than `longest_text_bytes` cannot fit into `context_length` tokens; None: nothing is certain.
    """

    def __init__(self, longest_text_bytes: int | None, context_length: int) -> None:
        self._of_one_prompt = _bound_of_one_prompt(longest_text_bytes, context_length)
        self._unread: Counter[str] = Counter()

    async def read(self, scope: Scope, receive: Receive) -> bytes | Failure | None:
        """The whole body, or why not; None when the client left before its end."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = self._of_one_prompt if scope["path"] in ONE_PROMPT else _Bound(MOST_BYTES, TOO_LARGE)
        if int(declared) > too_large.most_bytes:  # h11 has checked that it is a number
            return too_large.refusal
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(scope["client"][0] if scope["client"] else "", receive, too_large)
        except TimeoutError:
            return TOO_SLOW

    async def _read(self, host: str, receive: Receive, bound: "_Bound") -> bytes | Failure | None:
        body, counted = bytearray(), 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > bound.most_bytes:
                    return bound.refusal
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
