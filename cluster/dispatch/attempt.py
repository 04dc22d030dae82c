"""One attempt at a request on chosen workers, from the reservation to the last token. It runs in one of three ways:

    colocated   generate(W) ─ tokens ─>
    split       reserve(D) ─> prefill(P) ─ ticket ─> fetch(D) ─ first token ─> decode(D) ─ tokens ─>
    cut         reserve(D) ─> prefill(P, head) ─ ticket ─> fetch(D) ─> D computes the tail ─ tokens ─>

Every failure raises `AttemptFailed`, so that another attempt may succeed, or the request's final error. `release` frees
everything that workers still hold. `cluster.dispatch.migration` moves a running decode to another worker. Knows no
policy.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar, overload

from cluster.dispatch.message_queue import MessageQueue
from cluster.dispatch.worker_call import AttemptFailed, Background, WorkerCall
from cluster.dispatch.worker_client import Message, WorkerClient, WorkerLost
from cluster.events import NotComputable
from cluster.observe.ledger import Stopwatch
from kvtransfer.errors import Unlinked
from kvtransfer.ticket import PeerAddress, TransferReport, TransferTicket
from workers.log_fields import log_fields
from workers.request import FailedOut, FetchedOut, FinishReason, HeadOut, Request, SequenceTiming, TicketOut, TokensOut

logger = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class Phase(StrEnum):
    """Phase of a request; the values are in traces and deadline errors."""

    QUEUEING = "queueing"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    RECOVERY = "recovery"


class Attempt:
    """Owned by its request's coroutine. `prefill` and `decode` are the same client when colocated.

    `cut_tokens`: tokens that the prefill worker computes; the decode worker computes the rest (0: no cut). `answer`:
    the tokens so far, which `on_tokens` extends. `on_moved` gets source and target of a migration,
    `on_unlinked` owner and reader of a fetch that could not connect. `prefix_owner`: a worker that may have the
    prompt's prefix; the prefill worker fetches it, for at most `prefix_fetch_s`. `lenders` hold a part of the KV
    of a colocated attempt.
    """

    def __init__(
        self,
        request: Request,
        *,
        prefill: WorkerClient,
        decode: WorkerClient,
        watch: Stopwatch,
        answer: Sequence[int],
        on_tokens: Callable[[TokensOut], None],
        on_transfer: Callable[[str, TransferReport], None],
        on_moved: Callable[[str, str], None],
        on_unlinked: Callable[[str, str], None],
        background: Background,
        cut_tokens: int = 0,
        prefix_owner: WorkerClient | None = None,
        prefix_fetch_s: float = 0.0,
        lenders: Sequence[WorkerClient] = (),
    ) -> None:
        dtypes_differ = prefill.kv_dtype != decode.kv_dtype
        if dtypes_differ and request.generated:  # the decode worker computes the answer's KV, with the same rounding
            request = replace(request, group="")
            cut_tokens = min(cut_tokens or len(request.prompt), len(request.prompt))
        self.request = request
        self._prefill = WorkerCall(request=request, worker=prefill)
        fetching = replace(request, kv_dtype=prefill.kv_dtype) if dtypes_differ else request
        self.decode = self._prefill if prefill is decode else WorkerCall(request=fetching, worker=decode)
        self._cut_tokens = 0 if prefill is decode else cut_tokens
        self._watch = watch
        self.answer = answer
        self._on_tokens = on_tokens
        self._on_transfer = on_transfer
        self._on_moved = on_moved
        self.on_unlinked = on_unlinked
        self.background = background
        self._prefix_owner = prefix_owner if prefix_owner and prefix_owner.kv_dtype == prefill.kv_dtype else None
        self._prefix_fetch_s = prefix_fetch_s
        self._lenders = lenders
        self._messages = MessageQueue()
        self._latest: SequenceTiming | None = None
        self._head: SequenceTiming | None = None  # of a cut prompt's head, until its phase ends
        self.phase = Phase.QUEUEING
        self.transfers: list[TransferReport] = []
        self.cached_tokens = 0
        self.cached_from: tuple[tuple[str, int], ...] = ()  # (source, tokens)
        self.decode_workers = [decode.name]  # the last one is the current one
        self.switching = asyncio.Lock()  # held while the decode changes workers; delays messages
        self.migration: asyncio.Task[bool] | None = None
        self.num_moves = 0  # including failed ones

    # ---- colocated, split, cut ---------------------------------------------------------------------------------

    async def reserve(self, timeout_s: float) -> None:
        """Reserve blocks and a slot on the decode worker, within `timeout_s`. Not for colocated attempts."""
        decode = self.decode
        tail_tokens = self.request.num_tokens - self._cut_tokens if self._cut_tokens else 0
        decode.hold(self.on_message, prompt_tokens=tail_tokens)
        try:
            reservation = await decode.take(decode.handle.reserve(decode.request, timeout_s))
        except AttemptFailed as failure:
            if failure.refused_s is not None:
                self._watch.lap("reserve")
            raise
        self._watch.lap("reserve")
        if self._cut_tokens:
            self.cached_tokens = reservation.cached_tokens
            self.cached_from = (("device", self.cached_tokens),) if self.cached_tokens else ()

    async def run(self) -> FinishReason:
        """Run to the last token, after `reserve` where there are two workers."""
        self.phase = Phase.PREFILL
        if self._prefill is self.decode:
            return await self._run_colocated()
        if self._cut_tokens:
            return await self._run_cut()
        return await self._run_split()

    async def _run_colocated(self) -> FinishReason:
        worker = self.decode
        worker.hold(self.on_message, prompt_tokens=self.request.num_tokens)
        await self._fetch_prefix()
        await worker.take(worker.handle.generate(worker.request, await self._lender_addresses()))
        return await self._answer(await self._receive(TokensOut))

    async def _lender_addresses(self) -> tuple[PeerAddress, ...]:
        """Those of the lenders that answer."""
        addresses: list[PeerAddress] = []
        for lender in self._lenders:
            with suppress(AttemptFailed):
                addresses.append(await WorkerCall(request=self.request, worker=lender).call(lender.handle.address()))
        return tuple(addresses)

    async def _run_split(self) -> FinishReason:
        prefill, decode = self._prefill, self.decode
        await self._start_prefill(self.request.num_tokens)
        ticket = await self._receive(TicketOut)
        await decode.call(decode.handle.fetch(decode.key, ticket.ticket, False))
        first: TokensOut | None = None
        while first is None or not self.transfers:
            output = await self._receive(FetchedOut, TokensOut)
            if isinstance(output, FetchedOut):
                self.on_fetched(decode, output.report)
                continue
            first = output
            self._emit_first(first, Phase.TRANSFER)
            if first.finish is not None:
                return first.finish
            await decode.call(decode.handle.decode(decode.key, first.tokens[-1:]))
        prefill.done()  # both the KV and the first token have arrived
        self.phase = Phase.DECODE
        return await self._decode_to_end()

    async def _run_cut(self) -> FinishReason:
        decode = self.decode
        if self.cached_tokens >= self._cut_tokens:  # the decode worker has cached the head
            await decode.call(decode.handle.fetch(decode.key, None, True))
            return await self._answer(await self._receive(TokensOut))
        await self._start_prefill(self._cut_tokens)
        ticket = await self._receive(TicketOut)
        await decode.call(decode.handle.fetch(decode.key, ticket.ticket, True))
        while not isinstance(output := await self._receive(HeadOut, FetchedOut, TokensOut), TokensOut):
            if isinstance(output, HeadOut):
                self._on_head(output)
            else:
                self._on_head_fetched(output)
        return await self._answer(output)

    async def _start_prefill(self, num_tokens: int) -> None:
        prefill = self._prefill
        prefill.hold(self.on_message, prompt_tokens=num_tokens)
        await self._fetch_prefix()
        await prefill.take(prefill.handle.prefill(prefill.request, self._cut_tokens))

    async def _fetch_prefix(self) -> None:
        """The prefill worker begins to fetch the prompt's prefix from its owner. It computes what does not arrive."""
        owner = self._prefix_owner
        if owner is None:
            return
        try:
            holding = owner.handle.hold_prefix(self.request)
            ticket = await WorkerCall(request=self.request, worker=owner).call(holding)
        except AttemptFailed as failure:
            extra = log_fields(key=self.request.id, worker=failure.worker)
            logger.warning("request %s: could not fetch a prefix from %s", self.request.id, failure, extra=extra)
            return
        if ticket is not None:
            await self._prefill.call(self._fetched_prefix(ticket, owner.name))

    async def _fetched_prefix(self, ticket: TransferTicket, owner: str) -> None:
        """As `_fetch_prefix`."""
        with suppress(Unlinked):
            await self._prefill.handle.fetch_prefix(self.request, ticket, self._prefix_fetch_s)
            return
        self.on_unlinked(owner, self._prefill.name)

    def _on_head(self, output: HeadOut) -> None:
        """A cut prompt's head is computed."""
        self._cached(output)
        self._head = output.timing
        if self.transfers:
            self._prefill.done()
        else:
            self._end_prompt_phase(None)
            self.phase = Phase.TRANSFER

    def _on_head_fetched(self, output: FetchedOut) -> None:
        """The decode worker has a cut prompt's head and computes the tail."""
        self.on_fetched(self.decode, output.report)
        if self.phase is Phase.TRANSFER:  # the head's timing has arrived
            self._watch.lap("transfer_wait")
            self._prefill.done()
        else:
            self._prefill.is_held = False  # only the head's timing is still to come
        self.phase = Phase.PREFILL

    async def _answer(self, first: TokensOut) -> FinishReason:
        """Decode to the last token on the worker that sampled the first one."""
        self._emit_first(first, Phase.DECODE)
        if first.finish is not None:
            self.decode.done()
            return first.finish
        return await self._decode_to_end()

    async def _decode_to_end(self) -> FinishReason:
        while True:
            output = await self._receive(HeadOut, TokensOut)
            if isinstance(output, HeadOut):  # of a cut prompt; the first token came earlier
                self._cached(output)
                self._prefill.done()
                continue
            self._emit(output)
            if output.finish is not None:
                self.end_phase()
                self.decode.done()
                return output.finish

    @property
    def is_waiting(self) -> bool:
        """Whether no worker is known to have begun its prompt, so that another attempt may replace it."""
        return self.phase is Phase.PREFILL and not self._messages.num_received

    @property
    def num_unreported(self) -> int:
        """Tokens that the decode worker has sampled and not reported yet; 0 while messages wait."""
        return self.decode.worker.num_unreported(self.decode.key) if self._is_direct else 0

    @property
    def _is_direct(self) -> bool:
        """Whether tokens are emitted at once."""
        return self.phase is Phase.DECODE and not self._messages and not self.switching.locked()

    # ---- messages of the workers -------------------------------------------------------------------------------

    def on_message(self, call: WorkerCall, message: Message) -> None:
        """Take a message. Emits tokens in the middle of an answer at once; other messages wait for `run`."""
        self._messages.num_received += 1
        if self._is_direct and isinstance(message, TokensOut) and message.finish is None and call is self.decode:
            self._latest = message.timing
            try:
                self._on_tokens(message)
            except Exception as error:  # must end this attempt, not the worker's client
                self._messages.put(call, error)
        else:
            self._messages.put(call, message)

    def _expected_from(self) -> list[WorkerCall]:
        return [self.decode] if self.phase in (Phase.TRANSFER, Phase.DECODE) else [self._prefill, self.decode]

    @overload
    async def _receive(self, one: type[A], /) -> A: ...
    @overload
    async def _receive(self, one: type[A], two: type[B], /) -> A | B: ...
    @overload
    async def _receive(self, one: type[A], two: type[B], three: type[C], /) -> A | B | C: ...

    async def _receive(self, *expected: type[Any]) -> Any:
        """The next output, of one of these types. Raises the error that ends the attempt."""
        while True:
            await self._messages.wait(self._expected_from)
            async with self.switching:
                call, message = self._messages.pop()
            is_ours = call is self._prefill or call is self.decode
            if not is_ours or not (call.is_held or isinstance(message, HeadOut)):
                continue  # the call is done, or the decode has migrated
            if isinstance(message, WorkerLost):
                raise AttemptFailed(call.name, f"the worker was lost ({message.reason})")
            if isinstance(message, Exception):
                raise message
            if isinstance(message, FailedOut):
                if message.final:
                    raise NotComputable(f"{call.name}: {message.reason}")
                if message.unlinked:
                    self.on_unlinked(self._prefill.name, call.name)
                flags = {"corrupt": message.corrupt, "no_memory": message.no_memory}
                raise AttemptFailed(call.name, message.reason, **flags)
            if not isinstance(message, expected):
                raise AttemptFailed(call.name, f"it sent an unexpected {type(message).__name__}")
            return message

    def _emit_first(self, output: TokensOut, phase: Phase) -> None:
        """Emit the attempt's first token, and enter `phase`."""
        self._cached(output)
        self._end_prompt_phase(output.timing)
        self._watch.first_token()
        self.phase, self._latest = phase, None
        self._on_tokens(output)

    def _cached(self, output: HeadOut | TokensOut) -> None:
        if output.cached_tokens > self.cached_tokens:
            self.cached_tokens, self.cached_from = output.cached_tokens, output.cached_from

    def _emit(self, output: TokensOut) -> None:
        self._latest = output.timing
        self._on_tokens(output)

    def on_fetched(self, reader: WorkerCall, report: TransferReport) -> None:
        """The request's KV has arrived at a worker."""
        self.transfers.append(report)
        self._on_transfer(reader.name, report)

    # ---- phases, migrations, the end ---------------------------------------------------------------------------

    def end_phase(self) -> None:
        """End the current phase, divided by the worker's own timing."""
        timing = self._latest
        if self.phase is Phase.QUEUEING:
            self._watch.lap("reserve")
        elif len(self.answer) == len(self.request.generated):
            self._watch.lap("prefill_wire")
        elif timing is None:
            self._watch.lap("decode_wire")
        else:
            waited = ("transfer_wait", timing.wait_s)
            self._watch.lap(
                "decode_wire", (waited, ("decode_queue", timing.queue_s), ("decode_compute", timing.compute_s))
            )

    def _end_prompt_phase(self, timing: SequenceTiming | None) -> None:
        """End a phase of the prompt, divided into queueing and computing, of its head and its tail."""
        parts = [each for each in (self._head, timing) if each is not None]
        self._head = None
        queued = [("prefill_queue", each.queue_s) for each in parts]
        self._watch.lap("prefill_wire", (*queued, *(("prefill_compute", each.compute_s) for each in parts)))

    def may_move_to(self, worker: WorkerClient) -> bool:
        moves = self.migration is not None and not self.migration.done()
        return self.phase is Phase.DECODE and self.decode.is_held and not moves and worker is not self.decode.worker

    def moved_to(self, call: WorkerCall) -> None:
        """The decode has migrated to this worker."""
        self.end_phase()
        self._latest = None
        owner, self.decode = self.decode, call
        self.decode_workers.append(call.name)
        owner.release(self.background)
        self._on_moved(owner.name, call.name)

    def release(self) -> None:
        """Let all workers drop what they still hold; does not wait."""
        self._messages.close()
        if self.migration is not None:
            self.migration.cancel()  # it releases its target
        for call in (self._prefill, self.decode):
            call.release(self.background)
