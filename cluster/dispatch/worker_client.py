"""A gateway's client of one incarnation of a worker: subscribes, routes outputs to attempts, detects its death.

A worker is lost if its process is gone, or if it is silent for `dead_after_s` while this process runs. Its attempts get
`WorkerLost`, and no further one is placed there. Knows no policy and no request.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from cluster.dispatch.kv_event_reader import KVEventReader
from cluster.policy.routing.router import NOTHING_SENT, SentWork
from cluster.runtime.interface import WorkerStub
from cluster.runtime.runtime_errors import WorkerGone
from diptych.view import WorkerState, WorkerView
from diptych.watchdog import Watchdog
from workers.errors import WorkerError
from workers.request import DeferredSource, EngineOutputs, Output, TokensOut
from workers.stats import WorkerStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker is gone."""

    reason: str


Message = Output | WorkerLost
OnMessage = Callable[[Message], None]


class WorkerClient:
    """Owned by a WorkerDiscovery. `changed` is called when the worker first answers, and when it is lost; `touched`
    also for statistics, whenever `seen` changes. `sent`: the work sent to each worker since its latest statistics.
    `deferred`: what workers may have to tell late, by name.

    `cache` reads the worker's cache events. It is closed, and `handle` disconnected, with the client. `kv_dtype`: of
    the worker's pool.
    """

    def __init__(
        self,
        view: WorkerView,
        handle: WorkerStub,
        *,
        subscriber: str,
        silence_s: float,
        sent: dict[str, SentWork],
        deferred: dict[str, DeferredSource],
        touched: Callable[[], None],
        changed: Callable[[], None],
        cache: KVEventReader | None,
        kv_dtype: str,
    ) -> None:
        self.view = view
        self.name = view.name
        self.handle = handle
        self.subscriber = subscriber
        self.kv_dtype = kv_dtype
        self.has_answered = False
        self.stats: WorkerStats = view.stats
        self._sent = sent
        self._deferred = deferred
        self.lost: str | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.callers: set[asyncio.Task[Any]] = set()  # they wait for the worker; cancelled when it is lost
        self._silence_s = silence_s
        self.touched = touched
        self._changed = changed
        self._cache = cache
        self.reads_cache = cache is not None
        self._handlers: dict[str, OnMessage] = {}
        self._source: DeferredSource | None = None
        self._loop = asyncio.get_running_loop()
        self.last_outputs_s = self._loop.time()
        self._silence = Watchdog(silence_s, self._on_silence, shares_ticks=True)
        self._listening = asyncio.ensure_future(self._listen())

    def seen(self, published: WorkerView) -> WorkerView:
        """The published view with this client's statistics and state."""
        if published.incarnation != self.view.incarnation:
            return published
        seen = replace(published, stats=self.stats)
        if published.state is WorkerState.READY and self.lost is not None:
            seen = replace(seen, state=WorkerState.DEAD, detail=self.lost, stats=WorkerStats())
        elif published.state is WorkerState.READY and not self.has_answered:
            seen = replace(seen, state=WorkerState.STARTING, detail="no answer yet")
        return seen

    def join(self, key: str, on_message: OnMessage, prompt_tokens: int) -> None:
        """Send outputs for `key` to `on_message`, and `WorkerLost` if the worker is lost."""
        self.catch_up(with_tokens=False)
        self._handlers[key] = on_message
        sent = self._sent.get(self.name, NOTHING_SENT)
        self._sent[self.name] = SentWork(sent.prompt_tokens + prompt_tokens, sent.sequences + 1)
        if self.lost is not None:
            on_message(WorkerLost(self.lost))

    def redirect(self, key: str, on_message: OnMessage) -> None:
        """Replace the subscriber of a `key` that joined before."""
        self.report(key)
        if key in self._handlers:
            self._handlers[key] = on_message

    def leave(self, key: str) -> None:
        self.report(key)
        self._handlers.pop(key, None)

    # ---- late outputs ------------------------------------------------------------------------------------------

    def attach(self, source: DeferredSource | None) -> None:
        if self.lost is None:
            self._source = source
            if source is None:
                del self._deferred[self.name]
            else:
                self._deferred[self.name] = source

    def catch_up(self, *, with_tokens: bool = True) -> None:
        """Take what a worker in this process has not reported yet, up to now: statistics, and perhaps tokens."""
        if self._source is not None:
            self._source.catch_up(with_tokens)

    def report(self, key: str) -> None:
        """Take the tokens of this sequence that a worker in this process has not reported yet."""
        if self._source is not None:
            self._source.report(key)

    def num_unreported(self, key: str) -> int:
        """How many tokens of this sequence its worker has sampled but not reported yet."""
        return 0 if self._source is None else self._source.num_unreported(key)

    def on_deferred_stats(self, stats: WorkerStats, at_s: float) -> None:
        if self.lost is None:
            self._heard(stats, at_s)

    def on_deferred_tokens(self, outputs: Sequence[TokensOut]) -> None:
        if self.lost is None:
            try:
                self._route(outputs)
            except Exception as error:
                self._failed(error)

    def on_deferred_heartbeat(self) -> None:
        self._silence.reset()

    async def close(self) -> None:
        self._silence.close()
        self._listening.cancel()
        await asyncio.wait([self._listening])
        if self._cache is not None:
            await self._cache.close()
        await self.handle.disconnect()

    async def _listen(self) -> None:
        try:
            await self.handle.subscribe(self.subscriber, self._on_outputs, deferred=self)
        except (WorkerGone, WorkerError) as error:
            self.give_up(f"{type(error).__name__}: {error}")
        except Exception as error:
            self._failed(error)
        finally:
            self._silence.close()

    def _on_outputs(self, message: EngineOutputs) -> None:
        if self.lost is None:
            try:
                self._take(message)
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        logger.error("worker %s: its outputs could not be processed", self.name, exc_info=error)
        self.give_up(f"unexpected {type(error).__name__}: {error}")

    def _take(self, message: EngineOutputs) -> None:
        if not self.has_answered:
            self.has_answered = True
            self.touched()  # even if its statistics are those of the membership
            self._changed()
        self._heard(message.stats, self._loop.time())
        if self._cache is not None:
            self._cache.on_stats(message.stats.cache_number)
        self._route(message.outputs)

    def _heard(self, stats: WorkerStats, at_s: float) -> None:
        self._silence.reset()
        self.last_outputs_s = at_s
        if stats is not self.stats:  # an idle worker's are the same
            self.stats = stats
            self.touched()
        self._sent.pop(self.name, None)

    def _route(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            on_message = self._handlers.get(output.key)
            if on_message is not None:
                on_message(output)

    def _on_silence(self) -> None:
        self.give_up(f"it was silent for {self._silence_s:.1f} s")
        self._listening.cancel()

    def give_up(self, reason: str) -> None:
        """Mark the worker as lost, and notify its attempts. Only the first reason counts."""
        if self.lost is not None:
            return
        self.catch_up()
        logger.warning("worker %s is lost: %s", self.name, reason)
        if self._source is not None:
            self.attach(None)
        self.lost = reason
        self.touched()
        if self._cache is not None:
            self._cache.stop()
        self.ended.set_result(None)
        for caller in self.callers:
            caller.cancel()
        for on_message in tuple(self._handlers.values()):
            on_message(WorkerLost(reason))
        self._changed()
