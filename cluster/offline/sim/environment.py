"""The environment of simulated workers: machines whose workers slow each other down, and calls that take time.

Calls to a remote worker take time in both directions, and its statistics may be old.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from cluster.runtime.interface import WorkerHandle, WorkerStub
from workers.request import DeferredReader, EngineOutputs
from workers.stats import WorkerStats

Load = tuple[str, bool]  # a worker's pool, and whether its step has prompts
Slowdown = Mapping[tuple[Load, Load], float]  # (one, other) -> factor on steps of one while the other runs


@dataclass(slots=True)
class _Step:
    load: Load
    left_s: float  # if it had the machine to itself
    done: "asyncio.Future[None]"
    rate: float = 1.0


class SharedMachine:
    """Shared by its workers. A step runs at 1 / the largest slowdown by any step that runs beside it."""

    def __init__(self, slowdown: Slowdown) -> None:
        self._slowdown = slowdown
        self._steps: list[_Step] = []
        self._updated_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def spend(self, pool: str, seconds: float, has_prompts: bool) -> float:
        """Wait for a step that takes `seconds` alone. Returns how long it took beside the others."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        step = _Step((pool, has_prompts), seconds, loop.create_future())
        self._advance(begin_s)
        self._steps.append(step)
        self._plan(begin_s)
        try:
            await step.done
        finally:
            now_s = loop.time()
            if step in self._steps:  # cancelled
                self._advance(now_s)
                self._steps.remove(step)
                self._plan(now_s)
        return loop.time() - begin_s

    def _advance(self, now_s: float) -> None:
        for step in self._steps:
            step.left_s -= (now_s - self._updated_s) * step.rate
        self._updated_s = now_s

    def _plan(self, now_s: float) -> None:
        """Set the rate of every step, and a timer for the first one that ends."""
        for step in self._steps:
            step.rate = 1 / max(
                (self._slowdown.get((step.load, other.load), 1.0) for other in self._steps if other is not step),
                default=1.0,
            )
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._steps:
            first_s = min(step.left_s / step.rate for step in self._steps)
            self._timer = asyncio.get_running_loop().call_at(now_s + max(0.0, first_s), self._end)

    def _end(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._advance(now_s)
        min_s = min(step.left_s for step in self._steps)
        for step in [step for step in self._steps if step.left_s <= max(min_s, 0.0) + 1e-12]:
            self._steps.remove(step)
            if not step.done.done():
                step.done.set_result(None)
        self._plan(now_s)


class RemoteWorker:
    """A `WorkerHandle` whose calls take `call_s`, half of it each way, also when they raise. Outputs take half of it.

    Messages carry statistics that are at least `stale_s` old; outputs are not delayed further.
    """

    def __init__(self, worker: WorkerHandle, call_s: float, stale_s: float = 0.0) -> None:
        self.worker = worker
        self._target: WorkerHandle | WorkerStub = worker  # of calls: the handle's `start`, then the worker's
        self._half_s = call_s / 2
        self._stale_s = stale_s
        self._history: deque[tuple[float, WorkerStats]] = deque()

    def at(self, incarnation: str) -> WorkerStub:
        self._target = self.worker.at(incarnation)  # raises if that one is gone
        return cast(WorkerStub, self)

    async def subscribe(
        self, subscriber: str, on_outputs: Callable[[EngineOutputs], object], *, deferred: DeferredReader | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        in_transit: deque[EngineOutputs] = deque()  # timers that are due at the same time may fire in any order

        def send(message: EngineOutputs) -> None:
            in_transit.append(message)
            loop.call_later(self._half_s, arrive)

        def arrive() -> None:
            message = in_transit.popleft()
            if self._stale_s:
                message = msgspec.structs.replace(message, stats=self._aged(message.stats))
            on_outputs(message)

        await self._call("subscribe", subscriber, send)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            return await self._call(name, *args)

        return call

    async def _call(self, name: str, *args: Any) -> Any:
        verb: Callable[..., Awaitable[Any]] = getattr(self._target, name)
        await asyncio.sleep(self._half_s)
        try:
            return await verb(*args)
        finally:
            await asyncio.sleep(self._half_s)

    def _aged(self, stats: WorkerStats) -> WorkerStats:
        """The latest statistics that are `stale_s` old, or the first ones. Older ones are dropped."""
        history, now_s = self._history, asyncio.get_running_loop().time()
        history.append((now_s, stats))
        while len(history) > 1 and history[1][0] <= now_s - self._stale_s:
            history.popleft()
        return history[0][1]
