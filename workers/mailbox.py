"""The outputs for one subscriber until they are sent: everything since the last message goes into the next one.

Owned by a Worker; knows no transport. Its size is bounded by the tokens of the subscriber's requests.
"""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from workers.engine.timer import Timer
from workers.request import Output, TokensOut


class Mailbox:
    """Outputs for one subscriber. `close` it.

    `beat` sends a heartbeat at once; None: `take` returns without outputs, and its caller sends one.
    `sending_since_s`: when the send that is still running began; None: there is none.
    """

    def __init__(self, beat: Callable[[], object] | None = None) -> None:
        self.sending_since_s: float | None = None
        self._beat = beat
        self._wait_s = 0.0
        self._outputs: list[Output] = []
        self._latest: dict[str, int] = {}  # the index of each sequence's latest output
        self._arrived: asyncio.Future[None] | None = None  # while `take` waits
        self._heartbeat = Timer(self._on_heartbeat)

    def put(self, output: Output) -> None:
        """Add an output; consecutive tokens of one sequence are merged."""
        index = self._latest.get(output.key)
        if index is not None and isinstance(output, TokensOut):
            last = self._outputs[index]
            if isinstance(last, TokensOut) and _adjacent(last, output):
                self._outputs[index] = _merged(last, output)
                return
        self._latest[output.key] = len(self._outputs)
        self._outputs.append(output)
        self.wake()

    def wake(self) -> None:
        """Let a waiting `take` return now."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        """Stop the heartbeat and let a waiting `take` return."""
        self._heartbeat.close()
        self.wake()

    def _on_heartbeat(self) -> None:
        if self._beat is None:
            return self.wake()
        try:
            self._beat()
            self._heartbeat.start(self._wait_s)
        except Exception as error:
            assert self._arrived is not None, "the heartbeat runs while `take` waits"
            if not self._arrived.done():
                self._arrived.set_exception(error)

    async def take(self, wait_s: float) -> tuple[Output, ...]:
        """The outputs since the last call, as soon as there are any. After `wait_s` a heartbeat is due."""
        if not self._outputs:
            self._wait_s = wait_s
            self._heartbeat.start(wait_s)
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
            self._heartbeat.stop()
            if not self._outputs:
                return ()
        outputs = tuple(self._outputs)
        self._outputs.clear()
        self._latest.clear()
        return outputs


def _adjacent(last: TokensOut, new: TokensOut) -> bool:
    if last.token_s or new.token_s:
        return False
    return not last.prefilled and last.finish is None and last.first_position + len(last.tokens) == new.first_position


def _merged(last: TokensOut, new: TokensOut) -> TokensOut:
    return replace(
        new,
        first_position=last.first_position,
        tokens=last.tokens + new.tokens,
        logprobs=last.logprobs + new.logprobs,
    )
