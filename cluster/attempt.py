"""One attempt at a request on chosen workers: the way from reservation to last token, as one coroutine.

    split       reserve(D) ─> prefill(P) ─ ticket ─> fetch(D) ─ first token ─> decode(D) ─ tokens ─>
    colocated   generate(W) ─ tokens ─>

Whatever goes wrong raises `AttemptFailed` (another attempt may do) or lets a caller's error through; whatever is still
held on either side is released behind. Knows no policy.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from cluster.events import Unservable
from cluster.ledger import Stopwatch
from cluster.line import Line, LineLost, Said
from cluster.runtime.interface import WorkerGone
from kvtransfer.ticket import TransferReport
from workers.errors import InvalidRequest, Overloaded, UnknownSequence, WorkerClosed, WorkerError
from workers.request import FailedOut, FetchedOut, FinishReason, LegTiming, Request, TicketOut, TokensOut

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 5.0

T = TypeVar("T")


class AttemptFailed(Exception):
    """This attempt is over without a finish; `worker` is where it failed, `corrupt` that its KV was.

    `refused_s`: the worker is well but has no room, and says when to come again.
    """

    def __init__(self, worker: str, reason: str, *, corrupt: bool = False, refused_s: float | None = None) -> None:
        super().__init__(worker, reason)
        self.refused_s = refused_s
        self.worker = worker
        self.reason = reason
        self.corrupt = corrupt

    def __str__(self) -> str:
        return f"{self.worker}: {self.reason}"


class Attempt:
    """Owned by its dispatcher coroutine. `prefill` and `decode` are one line when colocated.

    `lender` may have the prompt's beginning; the prefill worker then fetches it first, for at most `borrow_s`.
    """

    def __init__(
        self,
        request: Request,
        prefill: Line,
        decode: Line,
        watch: Stopwatch,
        tokens: Callable[[TokensOut], None],
        background: Callable[[Coroutine[Any, Any, None]], None],
        *,
        lender: Line | None = None,
        borrow_s: float = 0.0,
    ) -> None:
        self._request = request
        self._prefill = prefill
        self._decode = decode
        self._watch = watch
        self._tokens = tokens
        self._background = background
        self._lender = lender
        self._borrow_s = borrow_s
        self._inbox: asyncio.Queue[tuple[str, Said | Exception]] = asyncio.Queue()  # bounded by its tokens
        self._taking = False
        self._held: dict[str, Line] = {}  # lines on which something of ours may still be held
        self._latest: LegTiming | None = None
        self._first_came = False
        self.transfer: TransferReport | None = None
        self.cached_tokens = 0
        self.phase = "queueing"

    # ---- the two ways ------------------------------------------------------------------------------------------

    async def reserve(self, timeout_s: float) -> None:
        """Split only: have the decode worker promise blocks within `timeout_s`."""
        self._hold(self._decode)
        try:
            await self._call(self._decode, self._decode.handle.reserve(self._for(self._decode), timeout_s))
        except Overloaded as error:
            self._watch.lap("reserve")
            raise AttemptFailed(self._decode.name, str(error), refused_s=error.retry_after_s) from None
        self._watch.lap("reserve")

    async def run(self) -> FinishReason:
        """To the last token."""
        self.phase = "prefill"
        self._hold(self._prefill)
        handle = self._prefill.handle
        split = self._prefill is not self._decode
        if self._lender is not None:
            await self._borrow(self._lender)
        try:
            request = self._for(self._prefill)
            await self._call(self._prefill, handle.prefill(request) if split else handle.generate(request))
        except Overloaded as error:
            raise AttemptFailed(self._prefill.name, str(error), refused_s=error.retry_after_s) from None
        while True:
            worker, said = await self._inbox.get()
            self._taking = True
            finish = await self._take(worker, said)
            self._taking = False
            if finish is not None:
                return finish

    async def _borrow(self, lender: Line) -> None:
        """Have the prefill worker fetch the prompt's beginning from who has it. If that fails, it computes more."""
        try:
            ticket = await self._call(lender, lender.handle.lend(self._request))
        except AttemptFailed as failure:
            logger.warning("request %s: nothing could be borrowed from %s", self._request.id, failure)
            return
        if ticket is not None:
            borrowing = self._prefill.handle.borrow(self._request, ticket, self._borrow_s)
            await self._call(self._prefill, borrowing)

    def hear(self, worker: str, said: Said) -> None:
        """Something came from one of our lines. Tokens in the middle of an answer wait for nobody: they go out at once.

        Everything else is taken in its turn.
        """
        waits = self._taking or not self._inbox.empty()
        if waits or not isinstance(said, TokensOut) or said.prefilled or said.finish is not None:
            self._inbox.put_nowait((worker, said))
        else:
            self._latest = said.timing
            try:
                self._tokens(said)
            except Exception as error:  # ours to end with, not the line's
                self._inbox.put_nowait((worker, error))

    async def _take(self, worker: str, output: Said | Exception) -> FinishReason | None:
        if isinstance(output, LineLost):
            if worker not in self._held:
                return None  # it had done its part
            raise AttemptFailed(worker, f"the worker was lost ({output.reason})")
        if isinstance(output, Exception):
            raise output
        if isinstance(output, FailedOut):
            raise AttemptFailed(worker, output.reason, corrupt=output.corrupt)
        if isinstance(output, TicketOut):
            await self._call(self._decode, self._decode.handle.fetch(output.key, output.ticket))
            return None
        if isinstance(output, FetchedOut):
            self.transfer = output.report
            self.phase = "decode" if self._first_came else "prefill"
            self._release_prefill_when_done()
            return None
        return await self._take_tokens(output)

    async def _take_tokens(self, output: TokensOut) -> FinishReason | None:
        self._latest = output.timing
        if output.prefilled:
            self._first_came = True
            self.cached_tokens = output.cached_tokens
            self.close_lap()
            self.phase = "decode" if self.transfer or self._prefill is self._decode else "transfer"
            self._latest = None
        self._tokens(output)
        if output.finish is not None:
            if not output.prefilled:
                self.close_lap()
            if not output.prefilled or self._prefill is self._decode:
                self._held.pop(self._decode.name, None)
            return output.finish
        if output.prefilled and self._prefill is not self._decode:
            await self._call(self._decode, self._decode.handle.decode(output.key, output.tokens[-1]))
            self._release_prefill_when_done()
        return None

    def _release_prefill_when_done(self) -> None:
        """Bytes and first token are both here: the prefill side holds nothing of ours, and may die in peace."""
        if self.transfer is not None and self._first_came:
            self._held.pop(self._prefill.name, None)
            self._prefill.leave(self._request.key)

    # ---- the books ---------------------------------------------------------------------------------------------

    def close_lap(self) -> None:
        """Book the time since the last lap, divided as the worker measured it."""
        timing = self._latest
        if not self._first_came:
            self._watch.lap("reserve" if self.phase == "queueing" else "prefill_wire")
        elif self.phase == "prefill":
            assert timing is not None, "a first token always carries its timing"
            parts = (("prefill_queue", timing.queue_s), ("prefill_compute", timing.compute_s))
            self._watch.lap("prefill_wire", parts)
            self._watch.first_token()
        elif timing is None:
            self._watch.lap("decode_wire")
        else:
            self._watch.lap(
                "decode_wire",
                (
                    ("transfer_wait", timing.wait_s),
                    ("decode_queue", timing.queue_s),
                    ("decode_compute", timing.compute_s),
                ),
            )

    def _for(self, line: Line) -> Request:
        return replace(self._request, reply_to=line.subscriber)

    # ---- calls and release -------------------------------------------------------------------------------------

    def _hold(self, line: Line) -> None:
        if line.name not in self._held:
            self._held[line.name] = line
            tokens = self._request.num_tokens if line is self._prefill else 0
            line.join(self._request.key, self.hear, tokens)

    async def _call(self, line: Line, call: Coroutine[Any, Any, T]) -> T:
        """A call that fails with its worker, or outlives it, fails the attempt; a caller's mistake is the caller's."""
        calling = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {calling, line.ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise AttemptFailed(line.name, f"the worker was lost ({line.lost})")
            return calling.result()
        except (WorkerGone, WorkerClosed) as error:
            line.hang_up(f"{type(error).__name__}: {error}")  # now, lest the next attempt goes there again
            raise AttemptFailed(line.name, f"{type(error).__name__}: {error}") from None
        except UnknownSequence as error:
            raise AttemptFailed(line.name, str(error)) from None
        except InvalidRequest as error:
            raise Unservable(str(error)) from None
        except Overloaded:
            raise
        except WorkerError as error:
            raise AttemptFailed(line.name, str(error)) from None
        finally:
            calling.cancel()

    def release(self) -> None:
        """Let both sides drop what they still hold; does not wait."""
        for line in (self._prefill, self._decode):
            line.leave(self._request.key)
        for line in self._held.values():
            if line.lost is None:
                self._background(_cancel(line, self._request.key))
        self._held.clear()


async def _cancel(line: Line, key: str) -> None:
    """Best effort: a worker that cannot be told has died, or will drop us as a silent subscriber."""
    try:
        async with asyncio.timeout(CANCEL_TIMEOUT_S):
            await line.handle.cancel(key)
    except (WorkerGone, WorkerError, TimeoutError):
        return
