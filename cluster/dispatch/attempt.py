"""One attempt at a request on chosen workers: the way from reservation to last token, as one coroutine.

    split       reserve(D) ─> prefill(P) ─ ticket ─> fetch(D) ─ first token ─> decode(D) ─ tokens ─>
    cut         reserve(D) ─> prefill(P, head) ─ ticket ─> fetch(D) ─> D computes the tail ─ tokens ─>
    colocated   generate(W) ─ tokens ─>
    moved       reserve(E) ─> hand_over(D) ─ ticket ─> fetch(E) ─> decode(E, what D drew meanwhile) ─ tokens ─>

Whatever goes wrong raises `AttemptFailed` (another attempt may do) or lets a caller's error through; whatever is still
held on any side is released behind. A move that goes wrong leaves the request where it is. Knows no policy.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from cluster.dispatch.worker_call import AttemptFailed, Background, WorkerCall
from cluster.dispatch.worker_client import LineLost, Said, WorkerClient
from cluster.events import NotComputable, Unservable
from cluster.observe.ledger import Stopwatch
from kvtransfer.ticket import TransferReport
from workers.log_fields import log_fields
from workers.request import (
    MIXED_KV,
    FailedOut,
    FetchedOut,
    FinishReason,
    HeadOut,
    Request,
    SequenceTiming,
    TicketOut,
    TokensOut,
)

logger = logging.getLogger(__name__)

MOVE_RESERVE_S = 2.0  # a worker that has no room sooner is no place to move to, and others wait behind
LIVENESS_S = 5.0  # after so long without a word, the workers are asked whether they still have the request


class _Switch:
    """In the inbox: what was said before it is taken first, and what is said after it waits."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class _Look:
    """In the inbox: `LIVENESS_S` have passed."""


class Attempt:
    """Owned by its dispatcher coroutine. `prefill` and `decode` are one line when colocated.

    `cut_tokens`: the prefill worker computes only so many, the decode worker the rest of the prompt (0: nothing is
    cut). `lender` may have the prompt's beginning; the prefill worker then fetches it first, for at most `borrow_s`.
    """

    def __init__(
        self,
        request: Request,
        prefill: WorkerClient,
        decode: WorkerClient,
        watch: Stopwatch,
        tokens: Callable[[TokensOut], None],
        background: Background,
        *,
        cut_tokens: int = 0,
        lender: WorkerClient | None = None,
        borrow_s: float = 0.0,
    ) -> None:
        unlike = prefill.kv_dtype != decode.kv_dtype
        if unlike and request.generated:  # the answer's KV is rounded as the first time: computed where it decodes
            request = replace(request, group="")
            cut_tokens = min(cut_tokens or len(request.prompt), len(request.prompt))
        self._request = request
        self._prefill = WorkerCall(request, prefill)
        fetching = replace(request, kv_dtype=prefill.kv_dtype) if unlike else request
        self._decode = self._prefill if prefill is decode else WorkerCall(fetching, decode)
        self._split = prefill is not decode
        self._cut_tokens = cut_tokens if self._split else 0
        self._watch = watch
        self._tokens = tokens
        self._background = background
        self._lender = lender if lender is not None and lender.kv_dtype == prefill.kv_dtype else None
        self._borrow_s = borrow_s
        self._inbox: asyncio.Queue[tuple[WorkerCall, Said | Exception | _Switch | _Look]] = (
            asyncio.Queue()
        )  # bounded by its tokens
        self._taking = False
        self._num_heard = 0
        self._quiet: tuple[int, frozenset[WorkerCall]] = (
            0,
            frozenset(),
        )  # what was heard, and who was missing, at the last look
        self._look_due: asyncio.TimerHandle | None = None
        self._known = [*request.generated]  # the answer's tokens so far
        self._latest: SequenceTiming | None = None
        self._head: SequenceTiming | None = None  # of a cut prompt's head, until it is booked
        self._head_came = self._first_came = self._ticket_came = False
        self._num_moves = 0
        self._coming: tuple[WorkerCall, asyncio.Future[TransferReport]] | None = None  # to where it moves
        self._moving: asyncio.Task[bool] | None = None
        self.transfer: TransferReport | None = None
        self.transfers: list[TransferReport] = []
        self.cached_tokens = 0
        self.decode_workers = [decode.name]  # the last one decodes now
        self.phase = "queueing"

    # ---- the ways ----------------------------------------------------------------------------------------------

    async def reserve(self, timeout_s: float) -> None:
        """Split only: have the decode worker promise blocks within `timeout_s`."""
        leg = self._decode
        leg.hold(self._hear, self._request.num_tokens - self._cut_tokens if self._cut_tokens else 0)
        try:
            reservation = await leg.take(leg.handle.reserve(leg.request, timeout_s))
        except AttemptFailed as failure:
            if failure.refused_s is not None:
                self._watch.lap("reserve")
            raise
        self._watch.lap("reserve")
        if reservation.cached_tokens >= self._cut_tokens > 0:  # it has the head already
            self.cached_tokens = reservation.cached_tokens
            await leg.call(leg.handle.fetch(leg.key, None, True))
            self._split = False

    async def run(self) -> FinishReason:
        """To the last token."""
        self.phase = "prefill"
        leg = self._prefill if self._split or self._prefill is self._decode else None
        if leg is not None:
            leg.hold(self._hear, self._cut_tokens or self._request.num_tokens)
            if self._lender is not None:
                await self._borrow(self._lender)
            handle, request = leg.handle, leg.request
            await leg.take(handle.prefill(request, self._cut_tokens) if self._split else handle.generate(request))
        self._look_later()
        while True:
            leg, said = await self._inbox.get()
            self._taking = True
            finish = await self._take(leg, said)
            self._taking = False
            if finish is not None:
                return finish

    async def _borrow(self, lender: WorkerClient) -> None:
        """Have the prefill worker fetch the prompt's beginning from who has it. If that fails, it computes more."""
        try:
            ticket = await WorkerCall(self._request, lender).call(lender.handle.hold_prefix(self._request))
        except AttemptFailed as failure:
            told = log_fields(key=self._request.id, worker=failure.worker)
            logger.warning("request %s: nothing could be borrowed from %s", self._request.id, failure, extra=told)
            return
        if ticket is not None:
            borrowing = self._prefill.handle.fetch_prefix(self._request, ticket, self._borrow_s)
            await self._prefill.call(borrowing)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing was heard of its prompt yet: it may be given up for another attempt."""
        begun = self._ticket_came or self._head_came or self._first_came or self._taking
        return self.phase == "prefill" and not begun and self._inbox.empty()

    # ---- what the workers say ----------------------------------------------------------------------------------

    def _hear(self, leg: WorkerCall, said: Said) -> None:
        """Something came from one of our lines. Tokens in the middle of an answer wait for nobody: they go out at once.

        Everything else is taken in its turn.
        """
        self._num_heard += 1
        if self._coming is not None and leg is self._coming[0] and not self._coming[1].done():
            self._arrives(self._coming[1], leg, said)
            return
        waits = self._taking or not self._inbox.empty()
        if waits or not isinstance(said, TokensOut) or said.prefilled or said.finish is not None:
            self._inbox.put_nowait((leg, said))
        elif leg is self._decode:
            self._latest = said.timing
            try:
                self._give(said)
            except Exception as error:  # ours to end with, not the line's
                self._inbox.put_nowait((leg, error))

    async def _take(self, leg: WorkerCall, said: Said | Exception | _Switch | _Look) -> FinishReason | None:
        if isinstance(said, _Switch):
            said.done.set_result(await self._switch(leg))
            return None
        if isinstance(said, _Look):
            await self._look()
            return None
        if leg not in (self._prefill, self._decode) or not (leg.is_held or isinstance(said, HeadOut)):
            return None  # it has done its part, or the request has left there
        if isinstance(said, LineLost):
            raise AttemptFailed(leg.name, f"the worker was lost ({said.reason})")
        if isinstance(said, Exception):
            raise said
        if isinstance(said, FailedOut):
            if said.final:
                raise NotComputable(f"{leg.name}: {said.reason}")
            raise AttemptFailed(leg.name, said.reason, corrupt=said.corrupt)
        if isinstance(said, TicketOut):
            self._ticket_came, decode = True, self._decode
            await decode.call(decode.handle.fetch(decode.key, said.ticket, bool(self._cut_tokens)))
        elif isinstance(said, HeadOut):
            self._take_head(said)
        elif isinstance(said, FetchedOut):
            self._take_fetched(said)
        else:
            return await self._take_tokens(leg, said)
        return None

    def _take_head(self, output: HeadOut) -> None:
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self._head_came = True
        self._head = output.timing
        if self.transfer is None:
            self._book_first("prefill_wire", None)
            self.phase = "transfer"
        else:
            self._prefill.done()

    def _take_fetched(self, output: FetchedOut) -> None:
        self.transfer = output.report
        self.transfers.append(output.report)
        self.phase = "decode" if self._first_came else "prefill"
        if not self._cut_tokens:
            self._release_prefill_when_done()
        elif self._head_came:
            self._watch.lap("transfer_wait")
            self._prefill.done()
        else:
            self._prefill.is_held = False  # all there is to come is its timing

    async def _take_tokens(self, leg: WorkerCall, output: TokensOut) -> FinishReason | None:
        self._latest = output.timing
        if output.prefilled:
            self._first_came = True
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            self.close_lap()
            self.phase = "decode" if self.transfer or leg is self._decode else "transfer"
            self._latest = None
        self._give(output)
        if output.finish is not None:
            if not output.prefilled:
                self.close_lap()
            if leg is self._decode:
                leg.done()
            return output.finish
        if output.prefilled and leg is not self._decode:
            await self._decode.call(self._decode.handle.decode(self._decode.key, output.tokens[-1:]))
            self._release_prefill_when_done()
        return None

    def _give(self, output: TokensOut) -> None:
        self._known += output.tokens
        self._tokens(output)

    def _release_prefill_when_done(self) -> None:
        """Bytes and first token are both here: the prefill side holds nothing of ours, and may die in peace."""
        if self.transfer is not None and self._first_came:
            self._prefill.done()

    # ---- liveness ----------------------------------------------------------------------------------------------

    def _look_later(self) -> None:
        look = self._decode, _Look()
        self._look_due = asyncio.get_running_loop().call_later(LIVENESS_S, self._inbox.put_nowait, look)

    async def _look(self) -> None:
        """Fail if a worker that must speak next has lost the request without a word: then no word would ever come.

        It must be missing at two looks with nothing heard between them, since its last words may be on their way.
        """
        heard_before, missing_before = self._quiet
        missing: frozenset[WorkerCall] = frozenset()
        if self._num_heard == heard_before:
            speaks = [self._decode] if self._first_came or self._head_came else [self._prefill, self._decode]
            missing = frozenset([leg for leg in dict.fromkeys(speaks) if await leg.is_missing()])
            for leg in missing & missing_before:
                raise AttemptFailed(leg.name, "the worker no longer has the request")
        self._quiet = self._num_heard, missing
        self._look_later()

    # ---- moving ------------------------------------------------------------------------------------------------

    async def move(self, line: WorkerClient, timeout_s: float) -> bool:
        """Have another worker go on with the decode, which goes on meanwhile; False when it stays where it is.

        The last step, after all has arrived there, is not bounded by `timeout_s` but by the worker's answer.
        """
        moves = self._moving is not None and not self._moving.done()
        if moves or self.phase != "decode" or not self._decode.is_held or line is self._decode.line:
            return False
        self._num_moves += 1
        unlike = self._decode.request.kv_dtype or self._decode.line.kv_dtype != line.kv_dtype
        request = replace(
            self._request,
            generated=tuple(self._known),
            group="",
            fresh=False,
            num_moves=self._num_moves,
            kv_dtype=MIXED_KV if unlike else "",
        )
        moving = self._moving = asyncio.ensure_future(self._move(WorkerCall(request, line), timeout_s))
        await asyncio.wait({moving})
        return not moving.cancelled() and moving.result()

    async def _move(self, leg: WorkerCall, timeout_s: float) -> bool:
        owner = self._decode
        try:
            async with asyncio.timeout(timeout_s):
                await self._bring(leg, owner, timeout_s)
            switch = _Switch()
            self._inbox.put_nowait((leg, switch))
            return await switch.done
        except (AttemptFailed, Unservable, TimeoutError) as error:
            reason = str(error) or f"it took longer than {timeout_s:.1f} s"
            told = log_fields(key=self._request.id, worker=owner.name)
            logger.warning("request %s stays at %s: %s", self._request.id, owner.name, reason, extra=told)
            return False
        finally:
            self._coming = None
            if self._decode is not leg:
                leg.release(self._background)

    async def _bring(self, leg: WorkerCall, owner: WorkerCall, timeout_s: float) -> None:
        """Bring what the owner has computed to where the request moves."""
        arrived: asyncio.Future[TransferReport] = asyncio.get_running_loop().create_future()
        arrived.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may come too late to matter
        self._coming = leg, arrived
        leg.hold(self._hear, 0)
        await leg.take(leg.handle.reserve(leg.request, min(timeout_s, MOVE_RESERVE_S)))
        ticket = await owner.call(owner.handle.hand_over(owner.key, leg.request.num_tokens))
        await leg.call(leg.handle.fetch(leg.key, ticket))
        if ticket is None:
            arrived.cancel()  # nothing is to come
        else:
            self.transfers.append(await arrived)

    @staticmethod
    def _arrives(arrived: "asyncio.Future[TransferReport]", leg: WorkerCall, said: Said) -> None:
        if isinstance(said, FetchedOut):
            arrived.set_result(said.report)
        elif isinstance(said, (FailedOut, LineLost)):
            arrived.set_exception(AttemptFailed(leg.name, said.reason))

    async def _switch(self, leg: WorkerCall) -> bool:
        """From here on the other worker decodes. What the owner says meanwhile waits, and counts only if this fails."""
        drawn = tuple(self._known[len(leg.request.generated) :])
        try:
            await leg.call(leg.handle.decode(leg.key, drawn))
        except (AttemptFailed, Unservable) as error:
            told = log_fields(key=self._request.id, worker=self._decode.name)
            logger.warning("request %s stays at %s: %s", self._request.id, self._decode.name, error, extra=told)
            return False
        self.close_lap()
        self._latest = None
        owner, self._decode = self._decode, leg
        self.decode_workers.append(leg.name)
        owner.release(self._background)
        return True

    # ---- the books ---------------------------------------------------------------------------------------------

    def close_lap(self) -> None:
        """Book the time since the last lap, divided as the worker measured it."""
        timing = self._latest
        if not self._first_came:
            self._watch.lap("reserve" if self.phase == "queueing" else "prefill_wire")
        elif self.phase == "prefill":
            assert timing is not None, "a first token always carries its timing"
            self._book_first("prefill_wire", timing)
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

    def _book_first(self, rest: str, timing: SequenceTiming | None) -> None:
        """A lap before the first token: what head and tail of the prompt took since the last, and the rest."""
        parts = [each for each in (self._head, timing) if each is not None]
        self._head = None
        queued = [("prefill_queue", each.queue_s) for each in parts]
        self._watch.lap(rest, (*queued, *(("prefill_compute", each.compute_s) for each in parts)))

    def release(self) -> None:
        """Let all sides drop what they still hold; does not wait."""
        if self._look_due is not None:
            self._look_due.cancel()
        if self._moving is not None:
            self._moving.cancel()  # and then it releases where it was to move
        for leg in (self._prefill, self._decode):
            leg.release(self._background)
