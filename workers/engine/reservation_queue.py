"""Reservations that wait for blocks and a slot: granted in the order of the calls, each with its own timeout.

The engine decides whether one fits. Knows no subscriber and no wire.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from workers.engine.engine import Engine
from workers.engine.sequence import Sequence
from workers.errors import Overloaded, UnknownSequence
from workers.request import Request, Reservation


@dataclass(slots=True, eq=False)
class _Waiting:
    """A reservation that is not granted yet."""

    request: Request
    future: "asyncio.Future[Reservation]"
    asked_s: float
    wanted: Sequence | None = None  # made at its first turn: hashing a long prompt takes milliseconds


class ReservationQueue:
    """Owned by a Worker. `granted` is called for each request that got its reservation, before its caller resumes."""

    def __init__(self, engine: Engine, granted: Callable[[Request], None]) -> None:
        self._engine = engine
        self._granted = granted
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, request: Request, timeout_s: float) -> Coroutine[Any, Any, Reservation]:
        """Queue at once; the coroutine waits for blocks and a slot.

        It raises `Overloaded` after `timeout_s`, `InvalidRequest`, or `UnknownSequence` after `give_up`.
        """
        loop = asyncio.get_running_loop()
        asked = _Waiting(request, loop.create_future(), loop.time())
        self._waiting.append(asked)
        self.grant()
        return self._answer(asked, timeout_s)

    async def _answer(self, asked: _Waiting, timeout_s: float) -> Reservation:
        if asked.future.done():
            return asked.future.result()
        try:
            async with asyncio.timeout(timeout_s):
                return await asked.future
        except TimeoutError:
            if asked.future.done() and not asked.future.cancelled():
                return asked.future.result()  # granted at the moment of the timeout
            raise Overloaded(f"no decode slot or blocks within {timeout_s:.1f} s", retry_after_s=1.0) from None
        finally:
            if asked in self._waiting:
                self._waiting.remove(asked)
                self.grant()

    def requests(self) -> Iterator[Request]:
        """Those that wait."""
        return (asked.request for asked in self._waiting)

    def grant(self) -> None:
        """Grant what fits now, in order. One that does not fit blocks the rest, unless it waits for a sibling's KV."""
        for asked in tuple(self._waiting):
            if not asked.future.done():
                if self._engine.reservations.waits_for_sibling(asked.request):
                    continue
                try:
                    if asked.wanted is None:
                        asked.wanted = self._engine.reservations.wanted(asked.request, asked.asked_s)
                    asked.future.set_result(self._engine.reservations.grant(asked.wanted))
                    self._granted(asked.request)
                except Overloaded:
                    return
                except Exception as error:  # of this request only
                    asked.future.set_exception(error)
            self._waiting.remove(asked)

    def give_up(self, matches: Callable[[Request], bool], reason: str) -> None:
        """Fail the waiting reservations of matching requests."""
        for asked in self._waiting:
            if matches(asked.request) and not asked.future.done():
                asked.future.set_exception(UnknownSequence(f"{asked.request.key}: {reason}"))
