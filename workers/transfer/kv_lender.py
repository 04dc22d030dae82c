"""Lends blocks to sequences of other workers: replies to the loan calls of kvtransfer.control.

Knows loans, tickets and the executor; knows no sequence.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from kvtransfer.control import AttendLoan, Borrow, LoanCall, OfferLoan, Renew, Repay
from kvtransfer.errors import LoanRefused
from kvtransfer.ticket import TransferTicket
from workers.config import SPAN, WorkerConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.sequence import Lease
from workers.transfer.kv_fetcher import KVFetcher


class KVLender:
    """Owned by a Worker. Calls `changed` when it takes or frees blocks."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        executor: Executor,
        fetcher: KVFetcher,
        ticket: Callable[[Lease], TransferTicket],
        changed: Callable[[], None],
    ) -> None:
        self._name = config.name
        self._block_size = config.engine.block_size
        self._can_lend = config.engine.can_lend
        self._engine = engine
        self._executor = executor
        self._fetcher = fetcher
        self._ticket = ticket
        self._changed = changed

    async def serve(self, call: LoanCall) -> Any:
        """The reply to one call of a borrower. Errors: `TransferError`."""
        loans = self._engine.loans
        match call:
            case Borrow(ticket, loan, held_tokens):
                return await self.borrow(ticket, loan, held_tokens)
            case AttendLoan():
                return await self.attend(call)
            case Renew(numbers):
                return loans.renew(numbers, _now_s())
            case OfferLoan(loan, num_tokens):
                blocks = loans.ready(loan, num_tokens // self._block_size, _now_s())
                return self._ticket(self._engine.leases.offer_held(f"loan:{loan}", blocks, _now_s()))
            case Repay(loan):
                loans.repay(loan)
                self._changed()

    async def borrow(self, ticket: TransferTicket, loan: int, held_tokens: int) -> int:
        """Take and fill blocks for this ticket. Errors: `TransferError`."""
        if not self._can_lend:
            raise LoanRefused(f"{self._name} lends no blocks: {self._block_size} does not divide {SPAN}", "block-size")
        if self._fetcher.is_rounded(ticket):
            raise LoanRefused(f"{self._name} lends no blocks to {ticket.owner.worker}: other KV dtype", "dtype")
        held, count = held_tokens // self._block_size, ticket.num_tokens // self._block_size
        number, blocks = self._engine.loans.take(count, _now_s(), loan, held)
        arrived = False
        try:
            await self._fetcher.pull(ticket, blocks, 0)
            arrived = True
        finally:
            self._engine.loans.filled(number, _now_s(), arrived=arrived)
            self._changed()
        return number

    async def attend(self, request: AttendLoan) -> bytes:
        """Attend to the loan's blocks, which are as they were when it returns. Errors: `TransferError`."""
        count = request.num_tokens // self._block_size
        blocks = self._engine.loans.ready(request.loan, count, _now_s())
        state = await self._executor.attend(blocks, request.query)
        self._engine.loans.ready(request.loan, count, _now_s())
        return state


def _now_s() -> float:
    return asyncio.get_running_loop().time()
