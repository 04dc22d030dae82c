"""Requests longer than every worker's KV pool: one worker serves them, and others hold the blocks that do not fit.

Pure. Source: Lin et al., Infinite-LLM (arXiv 2401.02669). Which blocks move, and when: `workers.engine.loans`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from cluster.policy.active_requests import Work
from cluster.policy.routing.picking import fitting, queued_tokens
from cluster.policy.routing.router import Ask, Placement
from cluster.spec import ClusterSpec
from diptych.view import WorkerState, WorkerView
from workers.config import KEPT_SHARE

MOST_LENDERS = 8  # of a request
UNSEEN_S = 2.0  # statistics may not show a request yet that began so recently


class Lending:
    """Which workers may lend to each other: of one rank, with KV of the same dtype."""

    def __init__(self, spec: ClusterSpec) -> None:
        able = [pool for pool in spec.pools if pool.parallel.world_size == 1 and pool.engine.can_lend]
        self._dtypes = {pool.name: pool.engine.dtype for pool in able}
        self._block_sizes = {pool.name: pool.engine.block_size for pool in able}
        limits = [pool.engine.max_model_len for pool in spec.pools if pool.engine.max_model_len is not None]
        self._limit = min(limits, default=None)

    def longest(self, workers: Iterable[WorkerView]) -> int:
        """Tokens of the longest sequence that these workers can hold together; 0 if none of them lends."""
        tokens: dict[str, list[int]] = defaultdict(list)
        for worker in workers:
            if worker.pool in self._dtypes:
                tokens[self._dtypes[worker.pool]].append(worker.capacity_tokens)
        sums = [
            int((1 - KEPT_SHARE) * sum(sorted(each)[-MOST_LENDERS - 1 :])) for each in tokens.values() if len(each) > 1
        ]
        longest = max(sums, default=0)
        return longest if self._limit is None else min(longest, self._limit)

    def choose(self, ask: Ask, borrowing: Sequence[Work] = ()) -> Placement | None:
        """The worker that serves the fewest of those that borrow already, with most free memory, and its lenders.

        None if a worker can hold the request, or all together cannot now, beside those that borrow.
        """
        if not self._dtypes or not ask.alone or fitting(ask):
            return None
        ready = [
            worker
            for worker in ask.view.workers
            if worker.state is WorkerState.READY
            and worker.capacity_tokens
            and worker.name not in ask.avoid
            and worker.pool in self._dtypes
        ]
        spare = {worker.name: self._spare_tokens(worker) for worker in ready}
        promised = _promised_tokens(ask, ready, borrowing)
        ready.sort(key=lambda worker: (-spare[worker.name], worker.name))
        served = Counter(work.decode for work in borrowing)
        for borrower in sorted(ready, key=lambda worker: served[worker.name]):
            lenders = [
                worker.name
                for worker in ready
                if worker is not borrower
                and spare[worker.name] > 0
                and self._dtypes[worker.pool] == self._dtypes[borrower.pool]
                and ask.view.linked(borrower.name, worker.name)
            ][:MOST_LENDERS]
            room = sum(spare[name] for name in (borrower.name, *lenders)) - promised
            if lenders and room > ask.request.num_tokens:
                reason = "longer than any worker's KV pool: others hold a part"
                return Placement(borrower.name, borrower.name, reason, lenders=tuple(lenders))
        return None

    def _spare_tokens(self, worker: WorkerView) -> int:
        stats = worker.stats
        blocks = stats.free_blocks - int(KEPT_SHARE * stats.total_blocks)
        return max(0, blocks) * self._block_sizes[worker.pool]


def _promised_tokens(ask: Ask, workers: Iterable[WorkerView], borrowing: Sequence[Work]) -> int:
    """Free memory that requests which borrow will still take: for answers, and for prompts not computed yet.

    Requests that start without it take each other's memory, fail, and are computed again.
    """
    queued = {worker.name: queued_tokens(ask, worker) for worker in workers}
    tokens = 0
    for work in borrowing:
        tokens += work.output_tokens
        if ask.now_s - work.began_s < UNSEEN_S:
            tokens += work.prompt_tokens
        elif work.prefilled_s is None:
            tokens += min(work.prompt_tokens, queued.get(work.decode, 0))
    return tokens
