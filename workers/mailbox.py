"""The outputs for one subscriber until its next poll, with one unacknowledged bundle at a time.

A bundle is sent again until it is acknowledged, so a lost reply loses no token. Owned by a Worker; knows no transport.
Its size is bounded by the tokens of the subscriber's requests.
"""

import asyncio

from msgspec.structs import replace

from workers.engine.timer import Timer
from workers.request import Output, TokensOut


class Mailbox:
    """Outputs for one subscriber."""

    def __init__(self, now_s: float) -> None:
        self.last_poll_s = now_s
        self.number = 0  # of the newest bundle
        self.polling = 0
        self._fresh: list[Output] = []
        self._sent: tuple[Output, ...] = ()
        self._arrived: asyncio.Future[None] | None = None  # while a poll waits
        self._heartbeat = Timer(self.pulse)
        self._turn = asyncio.Lock()  # a poll whose caller has left may still wait when the next one arrives

    def put(self, output: Output) -> None:
        """Add an output; adjacent tokens of one sequence are merged."""
        last = self._fresh[-1] if self._fresh else None
        if isinstance(output, TokensOut) and isinstance(last, TokensOut) and _adjacent(last, output):
            self._fresh[-1] = _merged(last, output)
        else:
            self._fresh.append(output)
        self.pulse()

    def pulse(self) -> None:
        """Let a waiting poll return now."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        """Stop the heartbeat and let a waiting poll return."""
        self._heartbeat.close()
        self.pulse()

    async def take(self, received: int, wait_s: float) -> tuple[int, tuple[Output, ...]]:
        """The next bundle's number and outputs; empty after `wait_s`. `received` is the last number that arrived."""
        async with self._turn:
            if received < self.number and self._sent:
                return self.number, self._sent
            if not self._fresh and self.number:  # a new subscriber gets its first bundle at once
                await self._wait(wait_s)
            self._sent, self._fresh = tuple(self._fresh), []
            self.number += 1
            return self.number, self._sent

    async def _wait(self, wait_s: float) -> None:
        self._heartbeat.start(wait_s)  # without outputs, an empty bundle is the heartbeat
        self._arrived = asyncio.get_running_loop().create_future()
        await self._arrived
        self._heartbeat.stop()


def _adjacent(last: TokensOut, new: TokensOut) -> bool:
    return (
        last.key == new.key
        and not last.prefilled
        and last.finish is None
        and last.first_position + len(last.tokens) == new.first_position
    )


def _merged(last: TokensOut, new: TokensOut) -> TokensOut:
    return replace(
        new,
        first_position=last.first_position,
        tokens=last.tokens + new.tokens,
        logprobs=last.logprobs + new.logprobs,
    )
