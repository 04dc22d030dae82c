"""The subscribers of one worker: which of them gets the outputs of which request, and the messages sent to each.

Knows no engine and no connection.
"""

import logging
from collections.abc import Awaitable, Callable

from diptych.clock import now_s
from workers.errors import WorkerError
from workers.mailbox import Mailbox
from workers.request import DeferredReader, EngineOutputs, Output, Request
from workers.stats import WorkerStats

logger = logging.getLogger(__name__)

SUBSCRIBER_TIMEOUT_S = 10.0  # a gateway that takes no outputs for this long is gone, and its requests with it


class Subscribers:
    """Owned by a Worker. `require_open` raises once the worker has failed or is closing. `left` is called with the name
    of a subscriber that has left or timed out; its requests must end.
    """

    def __init__(
        self,
        stats: Callable[[], WorkerStats],
        require_open: Callable[[], None],
        left: Callable[[str], None],
        heartbeat_s: float,
    ) -> None:
        self.routes: dict[str, str] = {}  # sequence key -> subscriber
        self._stats = stats
        self._require_open = require_open
        self._left = left
        self._heartbeat_s = heartbeat_s
        self._mailboxes: dict[str, Mailbox] = {}
        self._deferred_readers: dict[str, DeferredReader] = {}  # by subscriber
        self._num_remote = 0  # in other processes

    @property
    def can_stall(self) -> bool:
        """Whether there may be something for `expire`."""
        return self._num_remote > 0

    def require(self, request: Request) -> None:
        """Raises `WorkerError` if nobody gets its outputs."""
        if request.reply_to not in self._mailboxes:
            raise WorkerError(f"{request.reply_to or 'nobody'} gets the outputs and has not subscribed")

    def add(self, request: Request) -> None:
        """Its outputs go to `reply_to`."""
        self.routes[request.key] = request.reply_to

    def post(self, output: Output) -> None:
        subscriber = self.routes.get(output.key)
        if subscriber is not None:  # None: it was cancelled meanwhile
            self._mailboxes[subscriber].put(output)

    def deferred_reader(self, key: str) -> DeferredReader | None:
        return self._deferred_readers.get(self.routes.get(key, ""))

    async def serve(
        self,
        name: str,
        on_outputs: Callable[[EngineOutputs], object],
        room: Callable[[], Awaitable[object]] | None,
        deferred: DeferredReader | None,
        beat: Callable[[], object],
    ) -> None:
        """As `Worker.subscribe`. `beat` sends a heartbeat to a subscriber in this process."""
        if name in self._mailboxes:
            raise WorkerError(f"{name} subscribed before; choose another name")
        mailbox = self._mailboxes[name] = Mailbox(beat if room is None else None)
        outputs: tuple[Output, ...] = ()
        if deferred is not None:
            self._deferred_readers[name] = deferred
        self._num_remote += room is not None
        try:
            while True:
                on_outputs(EngineOutputs(outputs, self._stats()))
                if room is not None:
                    mailbox.sending_since_s = now_s()
                    await room()
                    mailbox.sending_since_s = None
                    if self._mailboxes.get(name) is not mailbox:
                        raise WorkerError(
                            f"{name} took no outputs for {SUBSCRIBER_TIMEOUT_S:.0f} s; its requests ended"
                        )
                outputs = await mailbox.take(self._heartbeat_s)
                self._require_open()
        finally:
            mailbox.close()
            self._num_remote -= room is not None
            self._deferred_readers.pop(name, None)
            if self._mailboxes.get(name) is mailbox:
                self._remove(name)

    def expire(self, now_s: float) -> None:
        """Remove subscribers that take no outputs."""
        for name, mailbox in list(self._mailboxes.items()):
            since_s = mailbox.sending_since_s
            if since_s is not None and now_s - since_s >= SUBSCRIBER_TIMEOUT_S:
                logger.warning("subscriber %s reads no outputs; its requests are cancelled", name)
                self._remove(name)

    def _remove(self, name: str) -> None:
        del self._mailboxes[name]
        self._left(name)

    def keys_of(self, name: str) -> list[str]:
        return [key for key, subscriber in self.routes.items() if subscriber == name]

    def wake(self) -> None:
        """Let all find out that the worker has failed."""
        for mailbox in self._mailboxes.values():
            mailbox.wake()

    def close(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.close()
