"""Moves blocks of this worker's sequences to lenders, lets the executor attend to them there, and gives them back.

Knows moves, loans and peers; knows no KV byte.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

from diptych.background_tasks import BackgroundTasks
from diptych.clock import now_s
from kvtransfer.errors import PeerLost, TransferError
from kvtransfer.ticket import PeerAddress, TransferTicket
from workers.config import WorkerConfig
from workers.engine.borrowing import BlockMove
from workers.engine.engine import Engine
from workers.engine.executor import Executor, SpanQuery
from workers.engine.loan_records import LoanRecords
from workers.engine.sequence import Lease, SpanReturn
from workers.engine.step import RemoteKV
from workers.errors import UnknownSequence
from workers.log_fields import log_fields
from workers.stats import BorrowStats
from workers.transfer.kv_fetcher import KVFetcher
from workers.transfer.peer_links import PeerLinks

logger = logging.getLogger(__name__)

MOVE_S = 30.0  # for a lender to read the blocks of one move, or for us to read them back
ATTEND_S = 5.0  # for a lender to attend
RENEW_S = 1.0  # between renewals, whose replies have the loans that are recalled


class KVBorrower:
    """Owned by a Worker. Close it before the peer links."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        executor: Executor,
        peer_links: PeerLinks,
        fetcher: KVFetcher,
        ticket: Callable[[Lease], TransferTicket],
        changed: Callable[[], None],
    ) -> None:
        self._name = config.name
        self._block_size = config.engine.block_size
        self._renew_s = min(RENEW_S, config.transfer.lease_s / 3)
        self._engine = engine
        self._peer_links = peer_links
        self._fetcher = fetcher
        self._ticket = ticket
        self._changed = changed
        self._lenders: dict[str, tuple[PeerAddress, ...]] = {}  # of each sequence that borrows
        self._addresses: dict[str, PeerAddress] = {}  # of these, by incarnation
        self._tasks = BackgroundTasks()
        self._renewal: asyncio.TimerHandle | None = None
        self._executor = executor
        self._num_layers = executor.facts.layout.num_layers
        self._records = LoanRecords(executor.facts.layout.block_bytes)
        self._can_borrow = False

    def add(self, key: str, lenders: tuple[PeerAddress, ...]) -> None:
        """The lenders of a new sequence, in the order to ask."""
        if not self._can_borrow:
            self._executor.borrow(self._attend)
            self._can_borrow = True
        self._lenders[key] = lenders
        self._addresses.update((each.incarnation, each) for each in lenders)

    def start(self) -> None:
        """Begin the moves and returns that the engine wants, and give back what it needs no longer."""
        if not self._lenders and not self._addresses:
            return
        for key in [key for key in self._lenders if not self._engine.holds(key)]:
            del self._lenders[key]
        for move in self._engine.borrowed.take_due():
            self._tasks.start(self._move(move))
        for wanted in self._engine.borrowed.take_returns():
            self._tasks.start(self._return(wanted))
        for span in self._engine.borrowed.take_repaid():
            self._tasks.start(self._repay(span))
        if not self._lenders and not self._tasks:
            self._addresses.clear()

    def stats(self) -> tuple[BorrowStats, ...]:
        """What is borrowed from each lender."""
        if not self._can_borrow:
            return ()
        return self._records.stats(self._engine.remote(), now_s())

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _move(self, move: BlockMove) -> None:
        reasons: list[str] = []
        try:
            for lender, last in self._candidates(move):
                try:
                    span = await self._move_to(lender, last, move)
                except TransferError as error:
                    self._records.refused(lender.worker, error)
                    reasons.append(f"{lender.worker}: {type(error).__name__}: {error}")
                    continue
                if not self._engine.borrowed.moved(move, span):
                    self._tasks.start(self._repay(span))
                self._arm()
                return self._changed()
            reason = f"no worker lends it blocks ({'; '.join(reasons) or 'no lender is known'})"
        except UnknownSequence:
            return  # it ended meanwhile
        except Exception as error:
            logger.exception(
                "worker %s: moving blocks of %s failed", self._name, move.key, extra=log_fields(self._name, move.key)
            )
            reason = f"unexpected {type(error).__name__}: {error}"
        self._engine.sequences.move_failed(move, reason)
        self._changed()

    def _candidates(self, move: BlockMove) -> Iterator[tuple[PeerAddress, RemoteKV | None]]:
        """Lenders to ask, each with its loan to extend: first the one that has the blocks before these."""
        known = self._addresses.get(move.last.lender) if move.last is not None else None
        if known is not None:
            yield known, move.last
        for lender in self._lenders.get(move.key, ()):
            if lender is not known:
                yield lender, None

    async def _move_to(self, lender: PeerAddress, last: RemoteKV | None, move: BlockMove) -> RemoteKV:
        client, _ = await self._peer_links.meet(lender)
        ticket = self._ticket(self._engine.sequences.offer_move(move, now_s()))
        loan, held = (last.loan, last.num_blocks) if last is not None else (0, 0)
        begun_s = now_s()
        number = await client.borrow(ticket, loan, held * self._block_size, MOVE_S)
        self._engine.borrowed.learn_move(now_s() - begun_s, move.count)
        return self._taken(lender, number, held + move.count)

    def _taken(self, lender: PeerAddress, number: int, num_blocks: int) -> RemoteKV:
        span = RemoteKV(lender.incarnation, number, num_blocks)
        self._records.taken(lender.worker, span, now_s())
        return span

    async def _return(self, wanted: SpanReturn) -> None:
        """Read a span back, or let another lender read it. On failure the lender has it until the recall's deadline."""
        try:
            async with asyncio.timeout(MOVE_S):
                if wanted.blocks:
                    await self._fetcher.pull(await self._offered(wanted.span), wanted.blocks, 0)
                    span = None
                else:
                    span = await self._pass_on(wanted)
            if not self._engine.borrowed.returned(wanted, span) and span is not None:
                self._tasks.start(self._repay(span))
            return self._changed()
        except (TransferError, TimeoutError) as error:
            reason = str(error) or f"it took longer than {MOVE_S:.0f} s"
            fields = log_fields(self._name, wanted.key)
            logger.warning("worker %s: a recalled loan is not repaid yet: %s", self._name, reason, extra=fields)
        except Exception:
            logger.exception("worker %s: returning a loan failed", self._name, extra=log_fields(self._name, wanted.key))
        self._engine.borrowed.not_returned(wanted)
        self._changed()

    async def _pass_on(self, wanted: SpanReturn) -> RemoteKV:
        """Let another lender read this span from its present one. Errors: `TransferError`."""
        reasons: list[str] = []
        for lender in self._lenders.get(wanted.key, ()):
            if lender.incarnation == wanted.span.lender:
                continue
            try:
                client, _ = await self._peer_links.meet(lender)
                number = await client.borrow(await self._offered(wanted.span), 0, 0, MOVE_S)
                return self._taken(lender, number, wanted.span.num_blocks)
            except TransferError as error:
                self._records.refused(lender.worker, error)
                reasons.append(f"{lender.worker}: {type(error).__name__}: {error}")
        raise TransferError(f"no other worker lends blocks ({'; '.join(reasons) or 'none is known'})")

    async def _offered(self, span: RemoteKV) -> TransferTicket:
        client, _ = await self._peer_links.meet(self._address(span))
        return await client.offer(span.loan, span.num_blocks * self._block_size)

    def _address(self, span: RemoteKV) -> PeerAddress:
        if (lender := self._addresses.get(span.lender)) is None:
            raise PeerLost(f"{span.lender} is not known here; compute the prompt again")
        return lender

    async def _repay(self, span: RemoteKV) -> None:
        """On failure the loan expires."""
        self._records.ended(span)
        if (lender := self._addresses.get(span.lender)) is None:
            return
        try:
            client, _ = await self._peer_links.meet(lender)
            await client.repay(span.loan)
        except TransferError as error:
            logger.warning("worker %s: could not repay %s: %s", self._name, lender.worker, error)

    async def _attend(self, span: RemoteKV, query: SpanQuery) -> bytes:
        """As `RemoteAttend`."""
        client, _ = await self._peer_links.meet(self._address(span))
        begun_s = now_s()
        state = await client.attend(span.loan, span.num_blocks * self._block_size, query, ATTEND_S)
        if not query.is_chunk:
            self._engine.borrowed.learn_wait((now_s() - begun_s) * self._num_layers)
        return state

    def _arm(self) -> None:
        """Renew loans while there are any."""
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_later(self._renew_s, self._renew)

    def _renew(self) -> None:
        self._renewal = None
        loans: dict[str, list[int]] = {}
        for span in self._engine.remote():
            loans.setdefault(span.lender, []).append(span.loan)
        for incarnation, numbers in loans.items():
            if (lender := self._addresses.get(incarnation)) is not None:
                self._tasks.start(self._renew_at(lender, tuple(numbers)))
        if loans:
            self._arm()

    async def _renew_at(self, lender: PeerAddress, loans: tuple[int, ...]) -> None:
        try:
            client, _ = await self._peer_links.meet(lender)
            if recalled := await client.renew(loans):
                self._records.recalled(lender.incarnation, recalled)
                self._engine.borrowed.recalled(lender.incarnation, recalled)
                self._changed()
        except TransferError as error:  # the next step finds out
            logger.warning("worker %s: could not renew loans of %s: %s", self._name, lender.worker, error)
