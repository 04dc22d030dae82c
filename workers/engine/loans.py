"""Blocks that this worker holds for sequences of other workers.

    take ──> blocks of the pool, filled by a checked read ──attend, renew──> kept ──repay, expiry──> free
    recall ──> `renew` says so; the borrower repays within `RECALL_S`, or the loan ends

Pure: time is an argument. Source: rBlocks and their debts, Lin et al., Infinite-LLM (arXiv 2401.02669).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtransfer.errors import LeaseLost, LoanRefused
from workers.config import KEPT_SHARE
from workers.engine.blocks import BlockPool

RECALL_S = 15.0  # for a borrower to repay a loan that is recalled
LENDS_AGAIN_S = (
    10.0  # from a recall until a worker lends again; less, so that the next attempt of a sequence may borrow
)


@dataclass(slots=True)
class Loan:
    """Blocks of one sequence's tokens, from its first borrowed one on. The first `num_ready` have their KV.

    It ends at `ends_s` although it is in use: finite once it is recalled.
    """

    number: int
    blocks: list[int]
    num_ready: int
    deadline_s: float
    ends_s: float = math.inf
    repaid: bool = False  # while its blocks are being filled, which go back when that has ended

    @property
    def is_filling(self) -> bool:
        return self.num_ready != len(self.blocks)


class LoanManager:
    """What this worker lends. Owned by an Engine. A loan holds one reference to each of its blocks."""

    def __init__(self, pool: BlockPool, ttl_s: float) -> None:
        self.expired = 0
        self.recalled = 0
        self._pool = pool
        self._ttl_s = ttl_s
        self._loans: dict[int, Loan] = {}
        self._number = 0
        self._lends_from_s = -math.inf

    def __len__(self) -> int:
        return len(self._loans)

    def __iter__(self) -> Iterator[Loan]:
        return iter(self._loans.values())

    @property
    def num_blocks(self) -> int:
        """Blocks on loan."""
        return sum(len(each.blocks) for each in self)

    def take(self, count: int, now_s: float, number: int = 0, held: int = 0) -> tuple[int, tuple[int, ...]]:
        """`count` more blocks for a new loan or (`number`) a known one: its number and these blocks.

        Of a known one, the borrower uses the first `held` blocks: it gave up on later ones. Each `take` ends with
        `filled`. Raises `LoanRefused` if there is no room, and `LeaseLost` if the loan has ended.
        """
        if number:
            loan = self._known(number)
            if loan.is_filling:
                raise LoanRefused(f"loan {number} is being extended already; ask another worker", "busy")
            self._pool.free(loan.blocks[held:])
            del loan.blocks[held:]
            loan.num_ready = len(loan.blocks)
        if now_s < self._lends_from_s or (number and loan.ends_s < math.inf):
            raise LoanRefused("this worker needs its blocks and recalls loans; ask another worker", "recalls")
        spare = self._pool.num_free - int(KEPT_SHARE * self._pool.num_blocks)
        if count > spare:
            raise LoanRefused(f"{count} blocks wanted, {max(0, spare)} can be lent; ask another worker", "no-room")
        if not number:
            self._number += 1
            loan = self._loans[self._number] = Loan(self._number, [], 0, 0.0)
        loan.deadline_s = now_s + self._ttl_s
        blocks = self._pool.allocate(count)
        loan.blocks += blocks
        return loan.number, tuple(blocks)

    def filled(self, number: int, now_s: float, *, arrived: bool) -> None:
        """The blocks of the last `take` have their KV, or will not get it. Raises `LeaseLost`."""
        loan = self._loans[number]
        if arrived and not loan.repaid:
            loan.num_ready = len(loan.blocks)
            return self._extend(loan, now_s)
        self._pool.free(loan.blocks[loan.num_ready :])
        del loan.blocks[loan.num_ready :]
        if loan.repaid or not loan.blocks:
            self.repay(number)
        if arrived:
            self._known(number)

    def ready(self, number: int, count: int, now_s: float) -> tuple[int, ...]:
        """The first `count` blocks, whose KV is here; extends the loan. Raises `LeaseLost`."""
        loan = self._known(number)
        if count > loan.num_ready:
            raise LeaseLost(f"loan {number} has {loan.num_ready} blocks, not {count}; compute the prompt again")
        self._extend(loan, now_s)
        return tuple(loan.blocks[:count])

    def renew(self, numbers: Iterable[int], now_s: float) -> tuple[int, ...]:
        """Extend those of these loans that have not ended. Returns those that are recalled."""
        known = [self._loans[number] for number in numbers if number in self._loans]
        for loan in known:
            self._extend(loan, now_s)
        return tuple(loan.number for loan in known if loan.ends_s < math.inf)

    def recall(self, wanted: int, now_s: float) -> None:
        """Ask for loans back, the largest first, if that gives the `wanted` blocks that this worker itself lacks."""
        loans = [each for each in self if not each.is_filling]
        if wanted > sum(len(each.blocks) for each in loans):
            return
        coming = sum(len(each.blocks) for each in loans if each.ends_s < math.inf)
        for loan in sorted(loans, key=lambda each: len(each.blocks), reverse=True):
            if coming < wanted and loan.ends_s == math.inf:
                loan.ends_s = now_s + RECALL_S
                loan.deadline_s = min(loan.deadline_s, loan.ends_s)
                coming += len(loan.blocks)
                self.recalled += 1
                self._lends_from_s = now_s + LENDS_AGAIN_S

    def repay(self, number: int) -> None:
        """End a loan, if there is one."""
        loan = self._loans.get(number)
        if loan is None:
            return
        if loan.is_filling:  # bytes may still arrive
            loan.repaid = True
            return
        del self._loans[number]
        self._pool.free(loan.blocks)

    def expire(self, now_s: float) -> None:
        """End every loan whose borrower was silent until its deadline, or did not repay. Not one that is filled."""
        for loan in [each for each in self if each.deadline_s <= now_s and not each.is_filling]:
            self.repay(loan.number)
            self.expired += 1

    def _extend(self, loan: Loan, now_s: float) -> None:
        loan.deadline_s = min(now_s + self._ttl_s, loan.ends_s)

    def _known(self, number: int) -> Loan:
        loan = self._loans.get(number)
        if loan is None or loan.repaid:
            raise LeaseLost(f"no loan {number}: it expired, or its worker restarted; compute the prompt again")
        return loan
