"""How many calls of a kind a client address may have at the same time. Knows grpc's contexts; knows no call."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]


class AddressLimit:
    """Owned by who counts. A proxy is one address."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._calls: Counter[str] = Counter()

    @asynccontextmanager
    async def held(self, context: Context) -> AsyncIterator[None]:
        """One more call of this address, or RESOURCE_EXHAUSTED, which raises grpc's `AbortError`."""
        address = context.peer().rpartition(":")[0]  # without the port
        if self._calls[address] >= self._max_calls:
            rule = f"this address has {self._max_calls} such calls, the most allowed; end some of them first"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, rule)
        self._calls[address] += 1
        try:
            yield
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]
