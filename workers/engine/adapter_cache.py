"""Which adapters a worker holds: loaded when a request needs one, the least recently used dropped to stay in a bound.

Knows ids and bytes; the executor holds the numbers. Adapters of requests that are here are never dropped.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection

from workers.engine.executor import Executor
from workers.errors import ModelError, Overloaded
from workers.request import Adapter


class AdapterCache:
    """Owned by a Worker. `in_use`: the ids of the adapters of its requests."""

    def __init__(self, executor: Executor, most_bytes: int, in_use: Callable[[], Collection[str]]) -> None:
        self._executor = executor
        self._max_bytes = most_bytes
        self._in_use = in_use
        self._held: OrderedDict[str, int] = OrderedDict()  # id -> bytes, least recently used first
        self.ids: tuple[str, ...] = ()  # as in `_held`; read at each look at the worker
        self._dropped: list[str] = []  # of which the executor does not know yet
        self._changing = asyncio.Lock()

    async def use(self, adapter: Adapter) -> None:
        """Returns when it is loaded; add its request before any other await.

        Raises `ModelError` if it cannot be loaded here, and `Overloaded` while those in use leave no room.
        """
        if adapter.id not in self._held:
            async with self._changing:
                if adapter.id not in self._held:
                    await self._load(adapter)
        self._held.move_to_end(adapter.id)
        self.ids = tuple(self._held)

    async def _load(self, adapter: Adapter) -> None:
        if adapter.num_bytes > self._max_bytes:
            fits = f"cache.adapters ({self._max_bytes} bytes)"
            raise ModelError(f"adapter {adapter.name!r} takes {adapter.num_bytes} bytes, more than {fits}; raise it")
        while sum(self._held.values()) + adapter.num_bytes > self._max_bytes:
            in_use = self._in_use()
            oldest = next((each for each in self._held if each not in in_use), None)
            if oldest is None:
                full = f"{len(self._held)} adapters of running requests fill cache.adapters ({self._max_bytes} bytes)"
                raise Overloaded(f"{full}; try again, or raise it", retry_after_s=1.0)
            del self._held[oldest]
            self.ids = tuple(self._held)
            self._dropped.append(oldest)
        drop, self._dropped = tuple(self._dropped), [adapter.id]  # if it fails, some ranks may have it
        await self._executor.load_adapter(adapter, drop)
        self._dropped.clear()
        self._held[adapter.id] = adapter.num_bytes
        self.ids = tuple(self._held)
