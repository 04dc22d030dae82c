"""The blocks of this worker's sequences that other workers hold, and their moves there and back.

    pool nearly full ──BlockMove──> leases the oldest full blocks ──moved──> frees them, and attends remotely
    room again ──SpanReturn──> reads the newest span back ──returned──> repays the loan
    lender recalls ──SpanReturn──> the same, or another lender reads it

Pure. Source: rBlocks and their debts, Lin et al., Infinite-LLM (arXiv 2401.02669).
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from workers.config import SPAN
from workers.engine.blocks import BlockPool
from workers.engine.sequence import Sequence, SpanReturn
from workers.engine.step import ELSEWHERE, RemoteKV

MOVED_SHARE = 0.25  # share of its full blocks that a sequence moves at a time, if it may need as many
NEWEST = 0.2  # weight of the newest of the measured times


@dataclass(frozen=True, slots=True)
class BlockMove:
    """The full blocks `first` ... `first + count - 1` of this sequence should move to a lender."""

    key: str
    first: int
    count: int
    last: RemoteKV | None = None  # the newest of the sequence's blocks elsewhere, whose lender can take these too


class BorrowedBlocks:
    """Which blocks of this worker's sequences should move, to lenders or back. Owned by an Engine.

    `low`: blocks; with fewer free ones, sequences that borrow move a part of their full blocks. If no lender takes
    these, a sequence goes on in the blocks that are free, and asks again a span later. A sequence has one move or
    return at a time.
    """

    def __init__(self, pool: BlockPool, low: int) -> None:
        self._pool = pool
        self._low = low
        self.span = max(1, SPAN // pool.block_size)  # blocks: moves are multiples of it
        self._borrowing: dict[str, Sequence] = {}
        self._arrived: dict[str, RemoteKV | None] = {}  # of moves and returns that wait for the end of a step
        self._returning: set[SpanReturn] = set()  # each holds a reference to its blocks
        self._due: list[BlockMove] = []
        self._due_returns: list[SpanReturn] = []
        self._repaid: list[RemoteKV] = []
        self._block_s = 0.0  # to move a block
        self._token_s = 0.0  # seconds that a decode waits for each lender of its sequence

    def learn_move(self, seconds: float, num_blocks: int) -> None:
        """A lender has read this many blocks."""
        self._block_s = _learned(self._block_s, seconds / num_blocks)

    def learn_wait(self, seconds: float) -> None:
        """A decode waits this long for a lender, in all layers together."""
        self._token_s = _learned(self._token_s, seconds)

    def add(self, sequence: Sequence) -> None:
        self._borrowing[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or lost its KV to a preemption that recomputes it."""
        if self._borrowing.pop(sequence.key, None) is not None:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Give up its KV."""
        self._repaid += sequence.remote
        if sequence.key in self._arrived:
            if (arrived := self._arrived.pop(sequence.key)) is not None:
                self._repaid.append(arrived)
            if sequence.returning is not None:
                self._drop(sequence.returning)
        sequence.remote.clear()
        sequence.num_moving = sequence.moves_from = sequence.moved_at = 0
        sequence.returning = None

    def remote(self) -> Iterator[RemoteKV]:
        """The blocks that lenders hold."""
        for each in self._borrowing.values():
            yield from each.remote

    def returning(self) -> Iterator[SpanReturn]:
        """Those in progress, also for sequences that have ended."""
        return iter(self._returning)

    @property
    def is_moving(self) -> bool:
        """Whether a move will free blocks, or can begin when a return has ended."""
        return any(each.num_moving or each.returning for each in self._borrowing.values())

    def take_due(self) -> list[BlockMove]:
        """Moves to begin; each ends with `moved` or `move_failed`."""
        due, self._due = self._due, []
        return due

    def take_returns(self) -> list[SpanReturn]:
        """Returns to begin; each ends with `returned` or `not_returned`."""
        due, self._due_returns = self._due_returns, []
        return due

    def take_repaid(self) -> list[RemoteKV]:
        """Blocks that lenders need not hold any longer."""
        repaid, self._repaid = self._repaid, []
        return repaid

    # ---- to lenders --------------------------------------------------------------------------------------------

    def start(self, *, is_short: bool) -> None:
        """Decide which moves and returns are due. `is_short`: other sequences wait for memory."""
        if not self._borrowing:
            return
        if self._pool.num_free >= self._low:
            return None if is_short else self._pull_back()
        for sequence in self._borrowing.values():
            first = sequence.num_remote
            full = sequence.num_computed // self._pool.block_size - first
            lacking = self._growth(sequence) + self._low - self._pool.num_free
            count = max(min(int(MOVED_SHARE * full) // self.span, -(-lacking // self.span)), 1) * self.span
            is_refused = sequence.num_computed < sequence.moves_from and self._pool.num_free
            if not is_refused and self._can_move(sequence) and sequence.blocks and count <= full:
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

    def move_failed(self, move: BlockMove) -> bool:
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

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that it may still need."""
        num_tokens = len(sequence.tokens) + sequence.max_remaining_tokens
        return -(-num_tokens // self._pool.block_size) - len(sequence.blocks)

    def _can_move(self, sequence: Sequence) -> bool:
        return not (sequence.num_moving or sequence.returning or sequence.finish_pending)

    # ---- and back ----------------------------------------------------------------------------------------------

    def recalled(self, lender: str, loans: Container[int]) -> None:
        """The lender wants these loans back. It says so again until they have ended.

        The newest span of a sequence comes back if it fits beside what the next steps need; others, and those that do
        not fit, go to other lenders.
        """
        for sequence in self._borrowing.values():
            for place, span in enumerate(sequence.remote, 1):
                if span.lender == lender and span.loan in loans and self._can_move(sequence):
                    fits = self._pool.num_free - span.num_blocks >= self._low
                    self._return(sequence, span, here=fits and place == len(sequence.remote))

    def _pull_back(self) -> None:
        """Read a sequence's newest span back where that pays, and what it still may need has room beside it."""
        for sequence in self._borrowing.values():
            if not sequence.remote or not self._can_move(sequence) or not sequence.blocks:
                continue
            span = sequence.remote[-1]
            room = self._pool.num_free - self._growth(sequence) - self._low
            since = sequence.num_computed - max(sequence.moved_at, sequence.num_initial_tokens)  # a prompt waits once
            if span.num_blocks <= room and self._pays(span.num_blocks, since, sequence.max_remaining_tokens):
                self._return(sequence, span, here=True)

    def _pays(self, num_blocks: int, tokens_since: int, tokens_to_come: int) -> bool:
        """Whether a pull takes less time than the waits that it saves.

        As many tokens as pay for it must have waited since the last move or return, too. So the pulls of a sequence
        whose memory comes and goes, or that ends early, take no more time than its waits.
        """
        return num_blocks * self._block_s < min(tokens_since, tokens_to_come) * self._token_s

    def _return(self, sequence: Sequence, span: RemoteKV, *, here: bool) -> None:
        blocks = self._pool.allocate(span.num_blocks) if here else ()
        sequence.returning = SpanReturn(sequence.key, span, tuple(blocks))
        self._returning.add(sequence.returning)
        self._due_returns.append(sequence.returning)

    def returned(self, wanted: SpanReturn, span: RemoteKV | None) -> bool:
        """The blocks have their KV, or another lender has (`span`). False: nobody wants them any more."""
        sequence = self._borrowing.get(wanted.key)
        if sequence is None or sequence.returning is not wanted:
            self._drop(wanted)
            return False
        self._arrived[wanted.key] = span
        self.settle()
        return True

    def not_returned(self, wanted: SpanReturn) -> None:
        """The lender still has the only copy."""
        sequence = self._borrowing.get(wanted.key)
        if sequence is not None and sequence.returning is wanted:
            sequence.returning, sequence.moved_at = None, sequence.num_computed
        self._drop(wanted)

    def _drop(self, wanted: SpanReturn) -> None:
        self._returning.remove(wanted)
        self._pool.free(wanted.blocks)

    # ---- between steps -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Apply what has arrived for sequences that no step in flight uses."""
        for key in [key for key in self._arrived if not self._borrowing[key].in_flight]:
            sequence, span = self._borrowing[key], self._arrived.pop(key)
            if sequence.returning is not None:
                self._bring_back(sequence, sequence.returning, span)
            else:
                assert span is not None, f"a move of {key} ended without a lender"
                self._replace(sequence, span)

    def _replace(self, sequence: Sequence, span: RemoteKV) -> None:
        first, count = sequence.num_remote, sequence.num_moving
        if sequence.remote and (sequence.remote[-1].lender, sequence.remote[-1].loan) == (span.lender, span.loan):
            sequence.remote.pop()
        sequence.remote.append(span)
        assert sequence.num_remote == first + count, f"{span} is not what {sequence.key} moved"
        self._pool.free(sequence.blocks[first : first + count])
        sequence.blocks[first : first + count] = [ELSEWHERE] * count
        sequence.num_moving, sequence.moved_at = 0, sequence.num_computed

    def _bring_back(self, sequence: Sequence, wanted: SpanReturn, span: RemoteKV | None) -> None:
        place = sequence.remote.index(wanted.span)
        sequence.remote[place : place + 1] = [] if span is None else [span]
        if span is None:
            first = sequence.num_remote
            sequence.blocks[first : first + len(wanted.blocks)] = wanted.blocks
        self._returning.remove(wanted)
        self._repaid.append(wanted.span)
        sequence.returning, sequence.moved_at = None, sequence.num_computed


def _learned(known: float, seconds: float) -> float:
    return known + NEWEST * (seconds - known) if known else seconds
