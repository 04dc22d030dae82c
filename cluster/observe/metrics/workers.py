"""Metrics of workers as a gateway sees them. Every gateway exports all workers. A worker's counters restart with it."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product

from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Rows, counter, gauge
from cluster.spec import Role
from diptych.view import REFUSALS, BorrowStats, ClusterView, TierStats, WorkerState, WorkerView

Value = Callable[[WorkerView], float]
LABELS = ("gateway", "worker", "pool")

GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("running_requests", "Running sequences.", lambda worker: worker.stats.running),
    ("waiting_requests", "Sequences that wait for blocks or a slot.", lambda worker: worker.stats.waiting),
    ("reserved_requests", "Reserved decode slots whose KV has not arrived.", lambda worker: worker.stats.reserved),
    ("queued_tokens", "Prompt tokens still to compute.", lambda worker: worker.stats.queued_tokens),
    ("kv_blocks", "Blocks of the KV pool.", lambda worker: worker.stats.total_blocks),
    ("kv_used_blocks", "Blocks in use.", lambda worker: worker.stats.used_blocks),
    ("kv_cached_blocks", "Free blocks that hold a prefix.", lambda worker: worker.stats.cached_blocks),
    ("kv_quarantined_blocks", "Blocks that a read may still write.", lambda worker: worker.stats.quarantined_blocks),
    ("leases", "Prompts held for a reader.", lambda worker: worker.stats.leases),
    ("lent_blocks", "Blocks that hold KV of other workers' sequences.", lambda worker: worker.stats.lent_blocks),
    ("borrowed_blocks", "Blocks of its sequences that others hold.", lambda worker: worker.stats.borrowed_blocks),
    ("step_seconds", "Moving average of the latest steps.", lambda worker: worker.stats.step_s),
    ("bubble_ratio", "Idle share of the stages' time.", lambda worker: worker.stats.bubble_share),
    ("adapters", "LoRA adapters in its memory.", lambda worker: len(worker.stats.adapters)),
    ("memory_bytes", "Resident memory, as last reported.", lambda worker: worker.memory_bytes),
)
COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("steps", "Steps.", lambda worker: worker.stats.steps),
    ("preemptions", "Preempted sequences.", lambda worker: worker.stats.preemptions),
    ("prefix_query_tokens", "Tokens looked up in the prefix cache.", lambda worker: worker.stats.sought_tokens),
    ("prefix_hit_tokens", "Tokens found in the prefix cache.", lambda worker: worker.stats.found_tokens),
    ("non_finite_requests", "Requests whose logits were not finite.", lambda worker: worker.stats.non_finite),
    ("expired_leases", "Leases that expired.", lambda worker: worker.stats.expired_leases),
    ("expired_loans", "Loans of blocks that expired.", lambda worker: worker.stats.expired_loans),
    ("transfers", "Fetches of KV that arrived.", lambda worker: worker.stats.pulls.arrived),
    ("failed_transfers", "Fetches of KV that failed.", lambda worker: worker.stats.pulls.failed),
    ("corrupt_transfers", "Of the failed, those with a wrong digest.", lambda worker: worker.stats.pulls.corrupt),
    ("transfer_bytes", "Bytes fetched.", lambda worker: worker.stats.pulls.num_bytes),
    ("transfer_seconds", "Time of the fetches that arrived, summed.", lambda worker: worker.stats.pulls.seconds),
    ("transfer_descriptors", "Ranges read.", lambda worker: worker.stats.pulls.num_descriptors),
)

TierValue = Callable[[TierStats], float]
SOURCE_COUNTERS: tuple[tuple[str, str, TierValue], ...] = (
    ("hit_tokens", "Of the found tokens, those of each tier; fetched: from others.", lambda tier: tier.hit_tokens),
    ("saved_seconds", "Time to compute these, less the time to load them.", lambda tier: tier.saved_s),
    ("lent_tokens", "Tokens that other workers fetched from the tier.", lambda tier: tier.lent_tokens),
)
TIER_GAUGES: tuple[tuple[str, str, TierValue], ...] = (
    ("blocks", "Blocks that the tier holds.", lambda tier: tier.blocks),
    ("capacity_blocks", "Blocks that it has room for.", lambda tier: tier.capacity_blocks),
    ("pinned_blocks", "Pinned blocks that it holds.", lambda tier: tier.pinned_blocks),
    ("healthy", "0: it is no longer read or written, or has stored nothing.", lambda tier: not tier.trouble),
)
TIER_COUNTERS: tuple[tuple[str, str, TierValue], ...] = (
    ("read_bytes", "KV read from the tier.", lambda tier: tier.read_bytes),
    ("written_bytes", "KV written to it.", lambda tier: tier.written_bytes),
    ("dropped_blocks", "Blocks that the tier did not store.", lambda tier: tier.dropped_blocks),
    ("timeouts", "Reads and writes past their deadline.", lambda tier: tier.late),
    ("failures", "Reads and writes that failed, and reads of other bytes.", lambda tier: tier.failures),
)


LoanValue = Callable[[BorrowStats], float]
LOAN_GAUGES: tuple[tuple[str, str, LoanValue], ...] = (
    ("loan_blocks", "Blocks of its sequences that this lender holds.", lambda loan: loan.blocks),
    ("loan_bytes", "Their KV.", lambda loan: loan.num_bytes),
    ("loan_oldest_seconds", "Age of its oldest loan from this lender.", lambda loan: loan.oldest_s),
)
LOAN_COUNTERS: tuple[tuple[str, str, LoanValue], ...] = (
    ("loans", "Loans from this lender.", lambda loan: loan.loans),
    ("loan_recalls", "Loans that this lender recalled.", lambda loan: loan.recalls),
)


def worker_families(gateway: str, view: ClusterView) -> Iterator[Metric]:
    live = live_workers(view)

    def rows(value: Value) -> Rows:
        return (((gateway, worker.name, worker.pool), value(worker)) for worker in live)

    roles = (((gateway, worker.name, worker.role.value), 1) for worker in view.workers)
    yield gauge("diptych_worker_role", "1: the worker's role.", ("gateway", "worker", "role"), roles)
    states = ("gateway", "role", "state")
    yield gauge("diptych_workers", "Workers by role and state.", states, _by_role_and_state(gateway, view))
    ready = Counter(worker.pool for worker in view.workers if worker.state is WorkerState.READY)
    there = (((gateway, pool.name), ready[pool.name]) for pool in view.pools)
    wanted = (((gateway, pool.name), pool.wanted) for pool in view.pools)
    yield gauge("diptych_pool_workers", "Workers of a pool that are ready.", ("gateway", "pool"), there)
    yield gauge("diptych_pool_target_workers", "Target number of workers of a pool.", ("gateway", "pool"), wanted)
    all_workers = tuple((gateway, worker.name, worker.pool) for worker in view.workers)
    failures = zip(all_workers, (worker.failures for worker in view.workers), strict=True)
    text = "Starts in a row that failed or did not last; 0: it runs."
    yield gauge("diptych_worker_consecutive_failures", text, LABELS, failures)
    restarts = zip(all_workers, (worker.restarts for worker in view.workers), strict=True)
    yield counter("diptych_worker_restarts", "How often the worker was replaced.", LABELS, restarts)
    for name, text, value in GAUGES:
        yield gauge(f"diptych_worker_{name}", text, LABELS, rows(value))
    for name, text, value in COUNTERS:
        yield counter(f"diptych_worker_{name}", text, LABELS, rows(value))
    yield from _tier_families(gateway, live)
    yield from _loan_families(gateway, live)


def _tier_families(gateway: str, live: tuple[WorkerView, ...]) -> Iterator[Metric]:
    labels = (*LABELS, "tier")

    named = [((gateway, worker.name, worker.pool), worker.stats) for worker in live]
    sources = [((*values, source.name), source) for values, stats in named for source in stats.sources]
    tiers = [((*values, tier.name), tier) for values, stats in named for tier in stats.tiers]
    for name, text, value in SOURCE_COUNTERS:
        yield counter(f"diptych_worker_cache_{name}", text, labels, [(values, value(each)) for values, each in sources])
    if not tiers:
        return
    for name, text, value in TIER_GAUGES:
        yield gauge(f"diptych_worker_cache_{name}", text, labels, [(values, value(tier)) for values, tier in tiers])
    for name, text, value in TIER_COUNTERS:
        yield counter(f"diptych_worker_cache_{name}", text, labels, [(values, value(tier)) for values, tier in tiers])


def _loan_families(gateway: str, live: tuple[WorkerView, ...]) -> Iterator[Metric]:
    labels = (*LABELS, "lender")
    pairs = [
        ((gateway, worker.name, worker.pool, loan.lender), loan) for worker in live for loan in worker.stats.borrowed
    ]
    if not pairs:
        return
    for name, text, value in LOAN_GAUGES:
        yield gauge(f"diptych_worker_{name}", text, labels, [(values, value(loan)) for values, loan in pairs])
    for name, text, value in LOAN_COUNTERS:
        yield counter(f"diptych_worker_{name}", text, labels, [(values, value(loan)) for values, loan in pairs])
    refused = [((*values, reason), dict(loan.refusals).get(reason, 0)) for values, loan in pairs for reason in REFUSALS]
    text = "Requests for a loan that this lender refused, by reason."
    yield counter("diptych_worker_loan_refusals", text, (*labels, "reason"), refused)


def live_workers(view: ClusterView) -> tuple[WorkerView, ...]:
    """Workers with current statistics."""
    return tuple(worker for worker in view.workers if worker.state in (WorkerState.READY, WorkerState.DRAINING))


def _by_role_and_state(gateway: str, view: ClusterView) -> Rows:
    """Includes zeros, so that an alert sees that there is none."""
    for role, state in product(Role, WorkerState):
        count = sum(worker.role is role and worker.state is state for worker in view.workers)
        yield (gateway, role.value, state.value), count
