"""The sequences of one engine by key, how they end, and their outputs until they are taken. Time is an argument."""

import logging
from collections.abc import Iterator

from workers.engine.blocks import BlockPool
from workers.engine.borrowing import BlockMove
from workers.engine.leases import LeaseBook
from workers.engine.loads import Loads
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Lease, Sequence, State
from workers.errors import InvalidRequest, UnknownSequence
from workers.request import FailedOut, HeadOut, Request, TokensOut

logger = logging.getLogger(__name__)

EngineOutput = TokensOut | HeadOut | FailedOut | Lease  # a Lease: a held prompt has its blocks, so its reader may start


class SequenceBook:
    """Owned by an Engine. `outputs`: since they were taken last, in order."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, leases: LeaseBook, loads: Loads) -> None:
        self.outputs: list[EngineOutput] = []
        self._pool = pool
        self._scheduler = scheduler
        self._leases = leases
        self._loads = loads
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, key: str) -> bool:
        return key in self._sequences

    def __getitem__(self, key: str) -> Sequence:
        return self._sequences[key]

    def get(self, key: str) -> Sequence | None:
        return self._sequences.get(key)

    def refuse_known(self, request: Request) -> None:
        """Raise `InvalidRequest` if a sequence of this key is here."""
        if request.key in self._sequences:
            raise InvalidRequest("request.id", f"{request.key!r} is already running here")

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence

    def take_outputs(self) -> list[EngineOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def offer_migration(self, key: str, most_tokens: int, now_s: float) -> Lease | None:
        """Lease the full blocks of a running sequence's first `most_tokens` tokens to the target of its migration.

        It continues here until it is aborted, whatever happens to the lease. None: there is no full block, so the
        target must compute everything. Raises `UnknownSequence`.
        """
        sequence = self._sequences.get(key)
        if sequence is None or sequence.finish_pending or sequence.hold or sequence.state is State.RESERVED:
            raise UnknownSequence(f"{key} does not decode here; it ended or has not started")
        if sequence.state is not State.RUNNING or sequence.remote:
            return None
        blocks = sequence.blocks[: min(sequence.num_computed, most_tokens) // self._pool.block_size]
        return self._leases.offer_held(key, blocks, now_s) if blocks else None

    def offer_move(self, move: BlockMove, now_s: float) -> Lease:
        """Lease the blocks of this move to a lender. Raises `UnknownSequence`."""
        sequence = self._sequences.get(move.key)
        if sequence is None or (sequence.num_remote, sequence.num_moving) != (move.first, move.count):
            raise UnknownSequence(f"{move.key} does not move blocks; it ended or was preempted")
        blocks = sequence.blocks[move.first : move.first + move.count]
        return self._leases.offer_held(f"{move.key}:move", blocks, now_s)

    def move_failed(self, move: BlockMove, reason: str) -> None:
        """No lender took them: the sequence fails if it needs their memory."""
        self._leases.drop(f"{move.key}:move")
        if self._scheduler.kv.moves.move_failed(move):
            self.fail(move.key, reason, no_memory=True)

    def abort(self, key: str) -> bool:
        """End a sequence and the lease of its KV, without further outputs; False when there is neither."""
        leased = self._leases.drop(key)
        sequence = self._sequences.get(key)
        if sequence is None or sequence.finish_pending:
            return leased
        self.end(sequence)
        return True

    def end(self, sequence: Sequence) -> None:
        """At once, or when its last step in flight has ended."""
        if sequence.in_flight:
            sequence.finish_pending = True
            return
        self._scheduler.remove(sequence)
        self._loads.end(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.key]

    def fail(self, key: str, reason: str, **flags: bool) -> None:
        """Abort, and report the reason to the subscriber. For the flags, see `FailedOut`."""
        if key in self._sequences:
            self.outputs.append(FailedOut(key, reason, **flags))
        self.abort(key)

    def fail_on_error(self, sequence: Sequence, error: Exception) -> None:
        """An error in work for one sequence ends that sequence only."""
        logger.error("%s failed with an unexpected error", sequence.key, exc_info=error)
        self.fail(sequence.key, f"unexpected {type(error).__name__}: {error}")

    def check(self) -> None:
        """Prove that each sequence is in the queue of its state. Raises AssertionError."""
        queued = [*self._scheduler.queues.waiting, *self._scheduler.queues.running]
        assert all(self._sequences[s.key] is s for s in queued), "a queue holds a sequence that ended"
        assert len(queued) == sum(s.state is not State.RESERVED for s in self)
