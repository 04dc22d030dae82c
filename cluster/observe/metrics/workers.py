"""Metrics of workers as a gateway sees them. Every gateway exports all workers. A worker's counters restart with it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Family, Rows, counter, families, gauge
from cluster.spec import Role
from diptych.view import REFUSALS, BorrowStats, ClusterView, TierStats, WorkerState, WorkerView

LABELS = ("gateway", "worker", "pool")

STARTS: tuple[Family[WorkerView], ...] = (
    (
        gauge,
        "consecutive_failures",
        "Starts in a row that failed or did not last; 0: it runs.",
        lambda each: each.failures,
    ),
    (counter, "restarts", "How often the worker was replaced.", lambda each: each.restarts),
)
WORKERS: tuple[Family[WorkerView], ...] = (
    (gauge, "running_requests", "Running sequences.", lambda each: each.stats.running),
    (gauge, "waiting_requests", "Sequences that wait for blocks or a slot.", lambda each: each.stats.waiting),
    (gauge, "reserved_requests", "Reserved decode slots whose KV has not arrived.", lambda each: each.stats.reserved),
    (gauge, "queued_tokens", "Prompt tokens still to compute.", lambda each: each.stats.queued_tokens),
    (gauge, "kv_blocks", "Blocks of the KV pool.", lambda each: each.stats.total_blocks),
    (gauge, "kv_used_blocks", "Blocks in use.", lambda each: each.stats.used_blocks),
    (gauge, "kv_cached_blocks", "Free blocks that hold a prefix.", lambda each: each.stats.cached_blocks),
    (gauge, "kv_quarantined_blocks", "Blocks that a read may still write.", lambda each: each.stats.quarantined_blocks),
    (gauge, "leases", "Prompts held for a reader.", lambda each: each.stats.leases),
    (gauge, "lent_blocks", "Blocks that hold KV of other workers' sequences.", lambda each: each.stats.lent_blocks),
    (gauge, "borrowed_blocks", "Blocks of its sequences that others hold.", lambda each: each.stats.borrowed_blocks),
    (gauge, "step_seconds", "Moving average of the latest steps.", lambda each: each.stats.step_s),
    (gauge, "bubble_ratio", "Idle share of the stages' time.", lambda each: each.stats.bubble_share),
    (gauge, "adapters", "LoRA adapters in its memory.", lambda each: len(each.stats.adapters)),
    (gauge, "memory_bytes", "Resident memory, as last reported.", lambda each: each.memory_bytes),
    (counter, "steps", "Steps.", lambda each: each.stats.steps),
    (counter, "preemptions", "Preempted sequences.", lambda each: each.stats.preemptions),
    (counter, "prefix_query_tokens", "Tokens looked up in the prefix cache.", lambda each: each.stats.sought_tokens),
    (counter, "prefix_hit_tokens", "Tokens found in the prefix cache.", lambda each: each.stats.found_tokens),
    (counter, "non_finite_requests", "Requests whose logits were not finite.", lambda each: each.stats.non_finite),
    (counter, "expired_leases", "Leases that expired.", lambda each: each.stats.expired_leases),
    (counter, "expired_loans", "Loans of blocks that expired.", lambda each: each.stats.expired_loans),
    (counter, "transfers", "Fetches of KV that arrived.", lambda each: each.stats.pulls.arrived),
    (counter, "failed_transfers", "Fetches of KV that failed.", lambda each: each.stats.pulls.failed),
    (counter, "corrupt_transfers", "Of the failed, those with a wrong digest.", lambda each: each.stats.pulls.corrupt),
    (counter, "transfer_bytes", "Bytes fetched.", lambda each: each.stats.pulls.num_bytes),
    (counter, "transfer_seconds", "Time of the fetches that arrived, summed.", lambda each: each.stats.pulls.seconds),
    (counter, "transfer_descriptors", "Ranges read.", lambda each: each.stats.pulls.num_descriptors),
)

SOURCES: tuple[Family[TierStats], ...] = (
    (
        counter,
        "hit_tokens",
        "Of the found tokens, those of each tier; fetched: from others.",
        lambda each: each.hit_tokens,
    ),
    (counter, "saved_seconds", "Time to compute these, less the time to load them.", lambda each: each.saved_s),
    (counter, "lent_tokens", "Tokens that other workers fetched from the tier.", lambda each: each.lent_tokens),
)
TIERS: tuple[Family[TierStats], ...] = (
    (gauge, "blocks", "Blocks that the tier holds.", lambda each: each.blocks),
    (gauge, "capacity_blocks", "Blocks that it has room for.", lambda each: each.capacity_blocks),
    (gauge, "pinned_blocks", "Pinned blocks that it holds.", lambda each: each.pinned_blocks),
    (gauge, "healthy", "0: it is no longer read or written, or has stored nothing.", lambda each: not each.trouble),
    (counter, "read_bytes", "KV read from the tier.", lambda each: each.read_bytes),
    (counter, "written_bytes", "KV written to it.", lambda each: each.written_bytes),
    (counter, "dropped_blocks", "Blocks that the tier did not store.", lambda each: each.dropped_blocks),
    (counter, "timeouts", "Reads and writes past their deadline.", lambda each: each.late),
    (counter, "failures", "Reads and writes that failed, and reads of other bytes.", lambda each: each.failures),
)

LOANS: tuple[Family[BorrowStats], ...] = (
    (gauge, "loan_blocks", "Blocks of its sequences that this lender holds.", lambda each: each.blocks),
    (gauge, "loan_bytes", "Their KV.", lambda each: each.num_bytes),
    (gauge, "loan_oldest_seconds", "Age of its oldest loan from this lender.", lambda each: each.oldest_s),
    (counter, "loans", "Loans from this lender.", lambda each: each.loans),
    (counter, "loan_recalls", "Loans that this lender recalled.", lambda each: each.recalls),
)


def worker_families(gateway: str, view: ClusterView) -> Iterator[Metric]:
    roles = (((gateway, worker.name, worker.role.value), 1) for worker in view.workers)
    yield gauge("diptych_worker_role", "1: the worker's role.", ("gateway", "worker", "role"), roles)
    states = ("gateway", "role", "state")
    yield gauge("diptych_workers", "Workers by role and state.", states, _by_role_and_state(gateway, view))
    ready = Counter(worker.pool for worker in view.workers if worker.state is WorkerState.READY)
    there = (((gateway, pool.name), ready[pool.name]) for pool in view.pools)
    wanted = (((gateway, pool.name), pool.wanted) for pool in view.pools)
    yield gauge("diptych_pool_workers", "Workers of a pool that are ready.", ("gateway", "pool"), there)
    yield gauge("diptych_pool_target_workers", "Target number of workers of a pool.", ("gateway", "pool"), wanted)

    def named(workers: Iterable[WorkerView]) -> list[tuple[tuple[str, ...], WorkerView]]:
        return [((gateway, worker.name, worker.pool), worker) for worker in workers]

    yield from families("diptych_worker_", LABELS, STARTS, named(view.workers))
    live = named(live_workers(view))
    yield from families("diptych_worker_", LABELS, WORKERS, live)
    sources = [((*values, each.name), each) for values, worker in live for each in worker.stats.sources]
    yield from families("diptych_worker_cache_", (*LABELS, "tier"), SOURCES, sources)
    if tiers := [((*values, each.name), each) for values, worker in live for each in worker.stats.tiers]:
        yield from families("diptych_worker_cache_", (*LABELS, "tier"), TIERS, tiers)
    if loans := [((*values, each.lender), each) for values, worker in live for each in worker.stats.borrowed]:
        yield from families("diptych_worker_", (*LABELS, "lender"), LOANS, loans)
        counts = ((values, dict(loan.refusals)) for values, loan in loans)
        refused = [((*values, reason), count.get(reason, 0)) for values, count in counts for reason in REFUSALS]
        text = "Requests for a loan that this lender refused, by reason."
        yield counter("diptych_worker_loan_refusals", text, (*LABELS, "lender", "reason"), refused)


def live_workers(view: ClusterView) -> tuple[WorkerView, ...]:
    """Workers with current statistics."""
    return tuple(worker for worker in view.workers if worker.state in (WorkerState.READY, WorkerState.DRAINING))


def _by_role_and_state(gateway: str, view: ClusterView) -> Rows:
    """Includes zeros, so that an alert sees that there is none."""
    for role, state in product(Role, WorkerState):
        count = sum(worker.role is role and worker.state is state for worker in view.workers)
        yield (gateway, role.value, state.value), count
