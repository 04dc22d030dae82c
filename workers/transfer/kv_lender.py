"""Lends blocks to sequences of other workers: the calls of `kvtransfer.control.LOANS`.

Knows loans, tickets and the executor; knows no sequence.
"""

from collections.abc import Callable

from diptych.clock import now_s
from kvtransfer.errors import LoanRefused
from kvtransfer.ticket import TransferTicket
from workers.config import SPAN, WorkerConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor, SpanQuery
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

    async def borrow(self, ticket: TransferTicket, loan: int, held_tokens: int) -> int:
        """Take and fill blocks for this ticket. Errors: `TransferError`."""
        if not self._can_lend:
            raise LoanRefused(f"{self._name} lends no blocks: {self._block_size} does not divide {SPAN}", "block-size")
        if self._fetcher.is_rounded(ticket):
            raise LoanRefused(f"{self._name} lends no blocks to {ticket.owner.worker}: other KV dtype", "dtype")
        held, count = held_tokens // self._block_size, ticket.num_tokens // self._block_size
        number, blocks = self._engine.loans.take(count, now_s(), loan, held)
        arrived = False
        try:
            await self._fetcher.pull(ticket, blocks, 0)
            arrived = True
        finally:
            self._engine.loans.filled(number, now_s(), arrived=arrived)
            self._changed()
        return number

    async def attend(self, loan: int, num_tokens: int, query: SpanQuery) -> bytes:
        """Attend to the loan's blocks, which are as they were when it returns. Errors: `TransferError`."""
        count = num_tokens // self._block_size
        blocks = self._engine.loans.ready(loan, count, now_s())
        state = await self._executor.attend(blocks, query)
        self._engine.loans.ready(loan, count, now_s())
        return state

    def renew(self, loans: tuple[int, ...]) -> tuple[int, ...]:
        return self._engine.loans.renew(loans, now_s())

    def offer(self, loan: int, num_tokens: int) -> TransferTicket:
        blocks = self._engine.loans.ready(loan, num_tokens // self._block_size, now_s())
        return self._ticket(self._engine.leases.offer_held(f"loan:{loan}", blocks, now_s()))

    def repay(self, loan: int) -> None:
        self._engine.loans.repay(loan)
        self._changed()
