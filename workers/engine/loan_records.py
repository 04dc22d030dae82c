"""What this worker borrows, by lender: for `diptych status` and metrics. Knows no block. Pure: time is an argument."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from diptych.view import BorrowStats
from kvtransfer.errors import LoanRefused, PeerLost, TransferError, TransferTimeout, Unlinked
from workers.engine.step import RemoteKV

MAX_LENDERS = 256  # whose counts are kept

_REASONS = {PeerLost: "lost", Unlinked: "lost", TransferTimeout: "timeout"}


@dataclass(slots=True)
class _Counts:
    loans: int = 0
    recalls: int = 0
    refusals: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Loan:
    worker: str
    taken_s: float
    is_recalled: bool = False


class LoanRecords:
    """Owned by a KVBorrower. Loans are known by their lender's incarnation and their number there."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._counts: dict[str, _Counts] = {}  # by the lender's name
        self._loans: dict[tuple[str, int], _Loan] = {}

    def taken(self, worker: str, span: RemoteKV, now_s: float) -> None:
        """A loan begins, or is extended."""
        key = span.lender, span.loan
        if key not in self._loans:
            self._loans[key] = _Loan(worker, now_s)
            self._of(worker).loans += 1

    def refused(self, worker: str, error: TransferError) -> None:
        """It did not lend blocks, or did not get their KV."""
        reason = error.reason if isinstance(error, LoanRefused) else _REASONS.get(type(error), "failed")
        self._of(worker).refusals[reason] += 1

    def recalled(self, lender: str, loans: Iterable[int]) -> None:
        """The lender says so until each has ended; it counts once."""
        for number in loans:
            loan = self._loans.get((lender, number))
            if loan is not None and not loan.is_recalled:
                loan.is_recalled = True
                self._of(loan.worker).recalls += 1

    def ended(self, span: RemoteKV) -> None:
        self._loans.pop((span.lender, span.loan), None)

    def stats(self, remote: Iterable[RemoteKV], now_s: float) -> tuple[BorrowStats, ...]:
        """`remote`: the blocks that lenders hold now."""
        found = {
            worker: BorrowStats(worker, 0, 0, 0.0, counts.loans, counts.recalls, tuple(sorted(counts.refusals.items())))
            for worker, counts in self._counts.items()
        }
        for span in remote:
            loan = self._loans.get((span.lender, span.loan))
            if loan is None:
                continue  # it has just been given back
            before = found.get(loan.worker) or BorrowStats(loan.worker)
            found[loan.worker] = structs.replace(
                before,
                blocks=before.blocks + span.num_blocks,
                num_bytes=before.num_bytes + span.num_blocks * self._block_bytes,
                oldest_s=max(before.oldest_s, now_s - loan.taken_s),
            )
        return tuple(found.values())

    def _of(self, worker: str) -> _Counts:
        counts = self._counts.setdefault(worker, _Counts())
        if len(self._counts) > MAX_LENDERS:
            del self._counts[next(iter(self._counts))]
        return counts
