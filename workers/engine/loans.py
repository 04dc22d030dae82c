"""Blocks that this worker holds for sequences of other workers, and the moves of its own sequences' blocks to others.

    borrower  pool nearly full ──BlockMove──> leases the oldest full blocks ──moved──> frees them, and attends remotely
    lender    take ──> blocks of the pool, filled by a checked read ──attend, renew──> kept ──repay, expiry──> free

Pure: time is an argument. Source: rBlocks and their debts, Lin et al., Infinite-LLM (arXiv 2401.02669).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtransfer.errors import LeaseLost, LoanRefused
from workers.config import KEPT_SHARE, SPAN
from workers.engine.blocks import BlockPool
from workers.engine.sequence import Sequence
from workers.engine.step import ELSEWHERE, RemoteKV

MOVED_SHARE = 0.25  # of its full blocks that a sequence moves at a time


@dataclass(slots=True)
class Loan:
    """Blocks of one sequence's tokens, from its first borrowed one on. The first `num_ready` have their KV."""

    number: int
    blocks: list[int]
    num_ready: int
    deadline_s: float


class LoanBook:
    """What this worker lends. Owned by an Engine. A loan holds one reference to each of its blocks."""

    def __init__(self, pool: BlockPool, ttl_s: float) -> None:
        self.expired = 0
        self._pool = pool
        self._ttl_s = ttl_s
        self._loans: dict[int, Loan] = {}
        self._number = 0

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

        Of a known one, the borrower uses the first `held` blocks: it gave up on later ones. Raises `LoanRefused` if
        there is no room, and `LeaseLost` if the loan has ended.
        """
        if number:
            loan = self._known(number)
            if len(loan.blocks) != loan.num_ready:
                raise LoanRefused(f"loan {number} is being extended already; ask another worker")
            self._pool.free(loan.blocks[held:])
            del loan.blocks[held:]
            loan.num_ready = len(loan.blocks)
        spare = self._pool.num_free - int(KEPT_SHARE * self._pool.num_blocks)
        if count > spare:
            raise LoanRefused(f"{count} blocks wanted, {max(0, spare)} can be lent; ask another worker")
        if not number:
            self._number += 1
            loan = self._loans[self._number] = Loan(self._number, [], 0, 0.0)
        loan.deadline_s = now_s + self._ttl_s
        blocks = self._pool.allocate(count)
        loan.blocks += blocks
        return loan.number, tuple(blocks)

    def filled(self, number: int, now_s: float, *, arrived: bool) -> None:
        """The blocks of the last `take` have their KV, or will not get it. Raises `LeaseLost`."""
        loan = self._known(number)
        if arrived:
            loan.num_ready, loan.deadline_s = len(loan.blocks), now_s + self._ttl_s
            return
        self._pool.free(loan.blocks[loan.num_ready :])
        del loan.blocks[loan.num_ready :]
        if not loan.blocks:
            del self._loans[number]

    def ready(self, number: int, count: int, now_s: float) -> tuple[int, ...]:
        """The first `count` blocks, whose KV is here; extends the loan. Raises `LeaseLost`."""
        loan = self._known(number)
        if count > loan.num_ready:
            raise LeaseLost(f"loan {number} has {loan.num_ready} blocks, not {count}; compute the prompt again")
        loan.deadline_s = now_s + self._ttl_s
        return tuple(loan.blocks[:count])

    def renew(self, numbers: Iterable[int], now_s: float) -> None:
        """Extend those of these loans that have not ended."""
        for number in numbers:
            if number in self._loans:
                self._loans[number].deadline_s = now_s + self._ttl_s

    def repay(self, number: int) -> None:
        """End a loan, if there is one."""
        if (loan := self._loans.pop(number, None)) is not None:
            self._pool.free(loan.blocks)

    def expire(self, now_s: float) -> None:
        """End every loan whose borrower was silent until its deadline. Not one that is being filled."""
        for loan in [each for each in self if each.deadline_s <= now_s and each.num_ready == len(each.blocks)]:
            self.repay(loan.number)
            self.expired += 1

    def _known(self, number: int) -> Loan:
        loan = self._loans.get(number)
        if loan is None:
            raise LeaseLost(f"no loan {number}: it expired, or its worker restarted; compute the prompt again")
        return loan


@dataclass(frozen=True, slots=True)
class BlockMove:
    """The full blocks `first` ... `first + count - 1` of this sequence should move to a lender."""

    key: str
    first: int
    count: int
    last: RemoteKV | None = None  # the newest of the sequence's blocks elsewhere, whose lender can take these too


class Moves:
    """Which blocks of this worker's sequences should move to lenders. Owned by an Engine.

    `low`: blocks; with fewer free ones, sequences that borrow move a part of their full blocks. If no lender takes
    these, a sequence goes on in the blocks that are free, and asks again a span later.
    """

    def __init__(self, pool: BlockPool, low: int) -> None:
        self._pool = pool
        self._low = low
        self._span = max(1, SPAN // pool.block_size)
        self._borrowing: dict[str, Sequence] = {}
        self._arrived: dict[str, RemoteKV] = {}  # of moves that wait for the end of a step
        self._due: list[BlockMove] = []
        self._repaid: list[RemoteKV] = []

    def add(self, sequence: Sequence) -> None:
        self._borrowing[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or lost its KV to a preemption that recomputes it."""
        if self._borrowing.pop(sequence.key, None) is not None:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Its KV is given up."""
        self._repaid += sequence.remote
        if (arrived := self._arrived.pop(sequence.key, None)) is not None:
            self._repaid.append(arrived)
        sequence.remote.clear()
        sequence.num_moving = sequence.moves_from = 0

    def remote(self) -> Iterator[RemoteKV]:
        """The blocks that lenders hold."""
        for each in self._borrowing.values():
            yield from each.remote

    @property
    def is_moving(self) -> bool:
        """Whether a move will free blocks."""
        return any(each.num_moving for each in self._borrowing.values())

    def take_due(self) -> list[BlockMove]:
        """Moves to begin; each ends with `moved` or `not_moved`."""
        due, self._due = self._due, []
        return due

    def take_repaid(self) -> list[RemoteKV]:
        """Blocks that lenders need not hold any longer."""
        repaid, self._repaid = self._repaid, []
        return repaid

    def start(self) -> None:
        """Decide which moves are due."""
        if not self._borrowing or self._pool.num_free >= self._low:
            return
        for sequence in self._borrowing.values():
            first = sequence.num_remote
            full = sequence.num_computed // self._pool.block_size - first
            count = max(int(MOVED_SHARE * full), self._span) // self._span * self._span
            is_refused = sequence.num_computed < sequence.moves_from and self._pool.num_free
            if not is_refused and not sequence.num_moving and sequence.blocks and count <= full and not sequence.doomed:
                sequence.num_moving = count
                last = sequence.remote[-1] if sequence.remote else None
                self._due.append(BlockMove(sequence.key, first, count, last))

    def moved(self, move: BlockMove, span: RemoteKV) -> bool:
        """A lender has these blocks now. `span`: all blocks of its loan. False: nobody wants them any more."""
        sequence = self._moving(move)
        if sequence is None:
            return False
        self._arrived[move.key] = span
        self.settle()
        return True

    def not_moved(self, move: BlockMove) -> bool:
        """No lender took them. Returns whether the sequence cannot go on without."""
        sequence = self._moving(move)
        if sequence is None:
            return False
        sequence.num_moving = 0
        sequence.moves_from = sequence.num_computed + SPAN
        return not self._pool.num_free

    def _moving(self, move: BlockMove) -> Sequence | None:
        sequence = self._borrowing.get(move.key)
        if sequence is None or (sequence.num_remote, sequence.num_moving) != (move.first, move.count):
            return None
        return sequence

    def settle(self) -> None:
        """Free the blocks of finished moves that no step in flight uses."""
        for key in [key for key in self._arrived if not self._borrowing[key].in_flight]:
            self._replace(self._borrowing[key], self._arrived.pop(key))

    def _replace(self, sequence: Sequence, span: RemoteKV) -> None:
        first, count = sequence.num_remote, sequence.num_moving
        if sequence.remote and (sequence.remote[-1].lender, sequence.remote[-1].loan) == (span.lender, span.loan):
            sequence.remote.pop()
        sequence.remote.append(span)
        assert sequence.num_remote == first + count, f"{span} is not what {sequence.key} moved"
        self._pool.free(sequence.blocks[first : first + count])
        sequence.blocks[first : first + count] = [ELSEWHERE] * count
        sequence.num_moving = 0
