"""A buffer of events between a request and its server, whose client may be slow. Knows no request and no wire."""

import asyncio
from collections import deque
from collections.abc import Callable

from cluster.frontend.text import GatewayEvent, TextDelta

# Sends a delta at once; False: it cannot now, and has done nothing. Must not wait or raise.
SendDelta = Callable[[TextDelta], bool]


class RequestOutputCollector:
    """`put` never waits. For a slow reader, `take` joins deltas.

    While the reader waits in `take`, deltas go to `send_delta`, so that they do not wake it. Bounded by the request: at
    most max_tokens tokens with their text, and one Accepted per attempt. Owned by the request's `Gateway.generate`.
    """

    def __init__(self, send_delta: SendDelta | None = None) -> None:
        self._events: deque[GatewayEvent] = deque()
        self._over: Exception | bool = False
        self._send_delta = send_delta
        self._reader: asyncio.Future[None] | None = None  # of a `take` that waits and has not been woken

    def put(self, event: GatewayEvent) -> None:
        if self._send_delta and self._reader and isinstance(event, TextDelta) and self._send_delta(event):
            return
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def end(self) -> None:
        """No further event follows."""
        self._over = self._over or True
        self._wake()

    def fail(self, error: Exception) -> None:
        """`take` raises this error after the buffered events. Only the first error counts."""
        if self._over is False:
            self._over = error
        self._wake()

    async def take(self) -> GatewayEvent | None:
        """The next event, deltas joined; None at the end."""
        while not self._events:
            if isinstance(self._over, Exception):
                raise self._over
            if self._over:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        event = self._events.popleft()
        if not isinstance(event, TextDelta) or not (self._events and isinstance(self._events[0], TextDelta)):
            return event
        return self._joined(event)

    def _joined(self, first: TextDelta) -> TextDelta:
        """`first`, joined with its answer's deltas up to the next event of another kind."""
        same: list[TextDelta] = [first]
        others: list[TextDelta] = []
        while self._events and isinstance(self._events[0], TextDelta):
            delta = self._events.popleft()
            assert isinstance(delta, TextDelta)
            (same if delta.index == first.index else others).append(delta)
        self._events.extendleft(reversed(others))
        return TextDelta.join(same)

    def clear(self) -> list[GatewayEvent]:
        """Remove and return all buffered events, in order."""
        events = list(self._events)
        self._events.clear()
        return events
