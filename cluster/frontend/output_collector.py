"""A buffer of events between a request and its server, whose client may be slow. Knows no request and no wire."""

import asyncio
from collections import deque

from cluster.frontend.text import GatewayEvent, TextDelta


class RequestOutputCollector:
    """`put` never waits. For a slow reader, `take` joins deltas.

    Bounded by the request: at most max_tokens tokens with their text, and one Accepted per attempt. Owned by the
    request's `Gateway.generate`.
    """

    def __init__(self) -> None:
        self._events: deque[GatewayEvent] = deque()
        self._over: Exception | bool = False
        self._wake = asyncio.Event()

    def put(self, event: GatewayEvent) -> None:
        self._events.append(event)
        self._wake.set()

    def end(self) -> None:
        """No further event follows."""
        self._over = self._over or True
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """`take` raises this error after the buffered events. Only the first error counts."""
        if self._over is False:
            self._over = error
        self._wake.set()

    async def take(self) -> GatewayEvent | None:
        """The next event, deltas joined; None at the end."""
        while not self._events:
            if isinstance(self._over, Exception):
                raise self._over
            if self._over:
                return None
            self._wake.clear()
            await self._wake.wait()
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
