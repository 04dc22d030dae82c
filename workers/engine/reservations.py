"""ReservationQueue that wait for blocks and a slot: granted in the order they were asked for, each within its own time.

Knows the engine's word on whether one fits; knows no subscriber and no wire.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from workers.engine.engine import Engine
from workers.engine.sequence import Sequence
from workers.errors import Overloaded, UnknownSequence
from workers.request import Request, Reservation


@dataclass(slots=True, eq=False)
class _Asked:
    """A reservation that somebody waits for."""

    request: Request
    future: "asyncio.Future[Reservation]"
    asked_s: float
    wanted: Sequence | None = None  # made when it is first its turn: hashing a long prompt takes milliseconds


class ReservationQueue:
    """Owned by a Worker. `granted` is called for each request that got its reservation, before its caller resumes."""

    def __init__(self, engine: Engine, granted: Callable[[Request], None]) -> None:
        self._engine = engine
        self._granted = granted
        self._waiting: deque[_Asked] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, request: Request, timeout_s: float) -> Coroutine[Any, Any, Reservation]:
        """Queue up at once; then wait for blocks and a slot.

        The wait raises `Overloaded` after `timeout_s`, `InvalidRequest`, or `UnknownSequence` when it was given up.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(request, loop.create_future(), loop.time())
        self._waiting.append(asked)
        self.grant()
        return self._answer(asked, timeout_s)

    async def _answer(self, asked: _Asked, timeout_s: float) -> Reservation:
        try:
            async with asyncio.timeout(timeout_s):
                return await asked.future
        except TimeoutError:
            if asked.future.done() and not asked.future.cancelled():
                return asked.future.result()  # granted in the moment in which the time was over
            raise Overloaded(f"no decode slot or blocks within {timeout_s:.1f} s", retry_after_s=1.0) from None
        finally:
            if asked in self._waiting:
                self._waiting.remove(asked)
                self.grant()

    def grant(self) -> None:
        """Something may fit now. The first that does not blocks the rest, unless it waits for the KV of a sibling."""
        for asked in tuple(self._waiting):
            if not asked.future.done():
                if self._engine.waits_for_sibling(asked.request):
                    continue
                try:
                    if asked.wanted is None:
                        asked.wanted = self._engine.wanted(asked.request, asked.asked_s)
                    asked.future.set_result(self._engine.grant(asked.wanted))
                    self._granted(asked.request)
                except Overloaded:
                    return
                except Exception as error:  # of this request alone; the others are asked for all the same
                    asked.future.set_exception(error)
            self._waiting.remove(asked)

    def give_up(self, whose: Callable[[Request], bool], reason: str) -> None:
        """Those that wait for these requests fail."""
        for asked in self._waiting:
            if whose(asked.request) and not asked.future.done():
                asked.future.set_exception(UnknownSequence(f"{asked.request.key}: {reason}"))
