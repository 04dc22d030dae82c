"""The statistics of an engine, recomputed only when something has changed. Pure."""

from collections.abc import Sequence as Items

from msgspec import structs

from workers.engine.blocks import BlockPool
from workers.engine.cache_hits import DEVICE, FETCHED, HOST
from workers.engine.estimate import StepEstimate
from workers.engine.leases import LeaseManager
from workers.engine.loans import LoanManager
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import State
from workers.engine.sequence_manager import SequenceManager
from workers.engine.store_tiers import StoreTier
from workers.stats import BorrowStats, Pulls, TierStats, WorkerStats


class EngineStats:
    """Owned by an Engine, whose parts it reads."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        leases: LeaseManager,
        loans: LoanManager,
        stores: Items[StoreTier],
        sequences: SequenceManager,
        estimate: StepEstimate,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._leases = leases
        self._loans = loans
        self._stores = stores
        self._sequences = sequences
        self._estimate = estimate
        self._step_s = 0.0
        self._known: WorkerStats | None = None  # the latest, unless more than decode steps change has changed

    def took(self, seconds: Items[float]) -> None:
        """Add the durations of steps with chunks."""
        step_s = self._step_s
        for each in seconds:
            step_s = 0.8 * step_s + 0.2 * each if step_s else each
        self._step_s = step_s

    def changed(self) -> None:
        """Something changed that decode steps do not change."""
        self._known = None

    def read(
        self, bubble_share: float, pulls: Pulls, adapters: tuple[str, ...], borrowed: tuple[BorrowStats, ...]
    ) -> WorkerStats:
        """The statistics, with these values from outside the engine."""
        known, pool, steps = self._known, self._pool, self._scheduler.steps
        decode_ratio, prompt_ratio = self._estimate.ratios
        if known is None or self._stores or pool.host.num_blocks:  # their statistics change at any time
            known = self._all(bubble_share, pulls, adapters, borrowed)
        elif (
            known.steps != steps
            or known.pulls is not pulls
            or known.bubble_share != bubble_share
            or known.adapters != adapters
            or known.borrowed != borrowed
        ):
            known = structs.replace(
                known,
                free_blocks=pool.num_free,
                cached_blocks=pool.num_cached,
                steps=steps,
                step_s=self._step_s,
                cache_number=pool.log.number,
                bubble_share=bubble_share,
                pulls=pulls,
                adapters=adapters,
                borrowed=borrowed,
                decode_ratio=decode_ratio,
                prompt_ratio=prompt_ratio,
            )
        self._known = known
        return known

    def _all(
        self, bubble_share: float, pulls: Pulls, adapters: tuple[str, ...], borrowed: tuple[BorrowStats, ...]
    ) -> WorkerStats:
        queued_tokens = num_reserved = 0
        decode_ratio, prompt_ratio = self._estimate.ratios
        hits, queues = self._pool.hits, self._scheduler.queues
        for each in self._sequences:
            if each.state is State.RESERVED:
                num_reserved += 1
            else:
                queued_tokens += len(each.tokens) - each.num_computed
        return WorkerStats(
            queued_tokens=queued_tokens,
            waiting=len(queues.waiting),
            running=len(queues.running),
            reserved=num_reserved,
            leases=len(self._leases),
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            quarantined_blocks=self._pool.num_quarantined,
            total_blocks=self._pool.num_blocks,
            steps=self._scheduler.steps,
            step_s=self._step_s,
            preemptions=queues.preemptions,
            expired_leases=self._leases.expired,
            lent_blocks=self._loans.num_blocks,
            borrowed_blocks=sum(each.num_blocks for each in self._scheduler.kv.borrowed.remote()),
            expired_loans=self._loans.expired,
            cache_number=self._pool.log.number,
            sought_tokens=hits.sought_tokens,
            found_tokens=sum(hits.tokens.values()),
            fetched_tokens=hits.tokens.get(FETCHED, 0),
            fetched_saved_s=hits.saved_s[FETCHED],
            device_saved_s=hits.saved_s[DEVICE],
            device_lent_tokens=self._leases.lent_tokens.get(DEVICE, 0),
            tiers=self._tiers(),
            non_finite=self._sequences.non_finite,
            bubble_share=bubble_share,
            pulls=pulls,
            adapters=adapters,
            borrowed=borrowed,
            decode_ratio=decode_ratio,
            prompt_ratio=prompt_ratio,
        )

    def _tiers(self) -> tuple[TierStats, ...]:
        if not self._pool.host.num_blocks:
            return ()
        host = structs.replace(self._scheduler.kv.tier.stats(), lent_tokens=self._leases.lent_tokens[HOST])
        return host, *(store.stats() for store in self._stores)
