"""Bodies on their way: each has a bound of size and time, and all of them, and those of each client address, of memory.

Knows ASGI; knows no request.
"""

import asyncio
from collections import Counter

from starlette.types import Receive, Scope

from cluster.http.failures import Failure

MOST_BYTES = 16 << 20
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


class Arriving:
    """Reads bodies. Owned by its `Connection`."""

    def __init__(self) -> None:
        self._unread: Counter[str] = Counter()

    async def read(self, scope: Scope, receive: Receive) -> bytes | Failure | None:
        """The whole body, or why not; None when the client left before its end."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > MOST_BYTES:  # h11 has checked that it is a number
            return TOO_LARGE
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(scope["client"][0] if scope["client"] else "", receive)
        except TimeoutError:
            return TOO_SLOW

    async def _read(self, host: str, receive: Receive) -> bytes | Failure | None:
        body, counted = bytearray(), 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > MOST_BYTES:
                    return TOO_LARGE
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
