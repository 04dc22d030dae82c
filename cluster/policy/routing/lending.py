"""Requests longer than every worker's KV pool: one worker serves them, and others hold the blocks that do not fit.

Pure. Source: Lin et al., Infinite-LLM (arXiv 2401.02669). Which blocks move, and when: `workers.engine.loans`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.policy.active_requests import ActiveRequest
from cluster.policy.routing.picking import fitting, queued_tokens
from cluster.policy.routing.router import Placement, PlacementQuery
from cluster.spec import ClusterSpec
from diptych.view import WorkerState, WorkerView
from workers.config import KEPT_SHARE, SPAN

MAX_LENDERS = 8  # of a request
UNSEEN_S = 2.0  # statistics may not show a request yet that began so recently


@dataclass(frozen=True, order=True, slots=True)
class Memory:
    """Tokens of a worker: for a sequence of its own, which is never left without a free block, and to lend."""

    own: int
    lent: int


class Lending:
    """Which workers may lend to each other: with KV of the same dtype, whatever their ranks."""

    def __init__(self, spec: ClusterSpec) -> None:
        able = [pool for pool in spec.pools if pool.engine.can_lend]
        self._dtypes = {pool.name: pool.engine.dtype for pool in able}
        self._block_sizes = {pool.name: pool.engine.block_size for pool in able}
        limits = [pool.engine.max_model_len for pool in spec.pools if pool.engine.max_model_len is not None]
        self._limit = min(limits, default=None)

    def longest(self, workers: Iterable[WorkerView]) -> int:
        """Tokens of the longest sequence that these workers can hold together; 0 if none of them lends."""
        memories: dict[str, list[Memory]] = defaultdict(list)
        for worker in workers:
            if worker.pool in self._dtypes:
                size, capacity = self._block_sizes[worker.pool], worker.capacity_tokens
                memories[self._dtypes[worker.pool]].append(Memory(capacity - size, int((1 - KEPT_SHARE) * capacity)))
        largest = (sorted(each)[-MAX_LENDERS - 1 :] for each in memories.values() if len(each) > 1)
        longest = max((min(_room(one, each) for one in each) for each in largest), default=0)
        return longest if self._limit is None else min(longest, self._limit)

    def choose(self, query: PlacementQuery, borrowing: Sequence[ActiveRequest] = ()) -> Placement | None:
        """The worker that serves the fewest of those that borrow already, with most free memory, and its lenders.

        None if a worker can hold the request, or all together cannot now, beside those that borrow.
        """
        if not self._dtypes or not query.may_colocate or fitting(query):
            return None
        ready = [
            worker
            for worker in query.view.workers
            if worker.state is WorkerState.READY
            and worker.capacity_tokens
            and worker.name not in query.avoid
            and worker.pool in self._dtypes
        ]
        memory = {worker.name: self._free(worker) for worker in ready}
        promised = _promised_tokens(query, ready, borrowing)
        ready.sort(key=lambda worker: (-memory[worker.name].lent, worker.name))
        served = Counter(work.decode for work in borrowing)
        for borrower in sorted(ready, key=lambda worker: served[worker.name]):
            lenders = [
                worker.name
                for worker in ready
                if worker is not borrower
                and memory[worker.name].lent >= SPAN
                and self._dtypes[worker.pool] == self._dtypes[borrower.pool]
                and query.view.linked(borrower.name, worker.name)
            ][:MAX_LENDERS]
            together = [memory[name] for name in (borrower.name, *lenders)]
            if lenders and _room(together[0], together) - promised > query.request.num_tokens:
                reason = "longer than any worker's KV pool: others hold a part"
                return Placement(borrower.name, borrower.name, reason, lenders=tuple(lenders))
        return None

    def _free(self, worker: WorkerView) -> Memory:
        stats, size = worker.stats, self._block_sizes[worker.pool]
        kept = int(KEPT_SHARE * stats.total_blocks)
        return Memory(max(0, stats.free_blocks - 1) * size, max(0, stats.free_blocks - kept) * size)


def _room(borrower: Memory, together: Sequence[Memory]) -> int:
    """Tokens that these workers hold for one of them, in whole spans at the others, and leaving each its share."""
    spans = sum(each.lent // SPAN * SPAN for each in together) - borrower.lent // SPAN * SPAN
    return min(borrower.own + spans, sum(each.lent for each in together))


def _promised_tokens(query: PlacementQuery, workers: Iterable[WorkerView], borrowing: Sequence[ActiveRequest]) -> int:
    """Free memory that requests which borrow will still take: for answers, and for prompts not computed yet.

    Requests that start without it take each other's memory, fail, and are computed again.
    """
    queued = {worker.name: queued_tokens(query, worker) for worker in workers}
    tokens = 0
    for work in borrowing:
        tokens += work.output_tokens
        if query.now_s - work.began_s < UNSEEN_S:
            tokens += work.prompt_tokens
        elif work.prefilled_s is None:
            tokens += min(work.prompt_tokens, queued.get(work.decode, 0))
    return tokens
