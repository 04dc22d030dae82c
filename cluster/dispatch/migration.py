"""Migrates a running decode from worker D to worker E. D keeps decoding until the last step:

    reserve(E) ─> offer_migration(D) ─ ticket ─> fetch(E) ─> decode(E, what D generated meanwhile) ─ tokens ─>

If a migration fails, the request stays where it is.
"""

import asyncio
import logging
from dataclasses import replace

from cluster.dispatch.attempt import Attempt
from cluster.dispatch.worker_call import AttemptFailed, WorkerCall
from cluster.dispatch.worker_client import Message, WorkerClient, WorkerLost
from cluster.events import Unservable
from kvtransfer.ticket import TransferReport
from workers.log_fields import log_fields
from workers.request import MIXED_KV, FailedOut, FetchedOut

logger = logging.getLogger(__name__)

MOVE_RESERVE_S = 2.0  # for the reservation on the target; other migrations wait meanwhile


async def migrate(attempt: Attempt, worker: WorkerClient, timeout_s: float) -> bool:
    """Migrate the decode to `worker`. False: it stays where it is.

    `timeout_s` limits the copy of the KV. The last step waits for the worker's answer without this limit.
    """
    if not attempt.may_move_to(worker):
        return False
    attempt.decode.report()
    attempt.num_moves += 1
    mixes_dtypes = attempt.decode.request.kv_dtype or attempt.decode.worker.kv_dtype != worker.kv_dtype
    request = replace(
        attempt.request,
        generated=tuple(attempt.answer),
        group="",
        fresh=False,
        num_moves=attempt.num_moves,
        kv_dtype=MIXED_KV if mixes_dtypes else "",
    )
    running = _Migration(attempt, WorkerCall(request=request, worker=worker)).run(timeout_s)
    attempt.migration = task = asyncio.ensure_future(running)
    await asyncio.wait({task})
    return not task.cancelled() and task.result()


class _Migration:
    """Owned by its attempt, which cancels it when the attempt ends."""

    def __init__(self, attempt: Attempt, target: WorkerCall) -> None:
        self._attempt = attempt
        self._owner = attempt.decode
        self._target = target
        self._arrived: asyncio.Future[TransferReport] = asyncio.get_running_loop().create_future()
        self._arrived.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody awaits it

    async def run(self, timeout_s: float) -> bool:
        attempt, target = self._attempt, self._target
        try:
            async with asyncio.timeout(timeout_s):
                await self._copy_kv(timeout_s)
            self._owner.report()
            async with attempt.switching:
                await self._switch()
            return True
        except (AttemptFailed, Unservable, TimeoutError) as error:
            reason = str(error) or f"it took longer than {timeout_s:.1f} s"
            extra = log_fields(key=attempt.request.id, worker=self._owner.name)
            logger.warning("request %s stays on %s: %s", attempt.request.id, self._owner.name, reason, extra=extra)
            return False
        finally:
            if attempt.decode is not target:
                target.release(attempt.background)

    async def _copy_kv(self, timeout_s: float) -> None:
        """Copy the owner's KV to the target."""
        owner, target = self._owner, self._target
        target.hold(self._on_message, prompt_tokens=0)
        await target.take(target.handle.reserve(target.request, min(timeout_s, MOVE_RESERVE_S)))
        ticket = await owner.call(owner.handle.offer_migration(owner.key, target.request.num_tokens))
        await target.call(target.handle.fetch(target.key, ticket))
        if ticket is not None:  # None: the target has cached all of it
            self._attempt.on_fetched(target, await self._arrived)

    def _on_message(self, call: WorkerCall, message: Message) -> None:
        if self._arrived.done():
            return
        if isinstance(message, FetchedOut):
            self._arrived.set_result(message.report)
        elif isinstance(message, (FailedOut, WorkerLost)):
            if isinstance(message, FailedOut) and message.unlinked:
                self._attempt.on_unlinked(self._owner.name, self._target.name)
            self._arrived.set_exception(AttemptFailed(call.name, message.reason))

    async def _switch(self) -> None:
        """Let the target decode. Messages of both workers wait; the owner's are used only if this fails."""
        attempt, target = self._attempt, self._target
        if not self._owner.is_held:
            raise AttemptFailed(self._owner.name, "the request has ended there")
        target.redirect(attempt.on_message)
        generated = tuple(attempt.answer[len(target.request.generated) :])
        await target.call(target.handle.decode(target.key, generated))
        attempt.moved_to(target)
