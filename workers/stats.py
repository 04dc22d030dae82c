"""How a worker is doing, as one immutable record; cheap enough to travel with every bundle."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """`queued_tokens`: prompt tokens still to compute. `reserved`: decode slots promised whose KV is not here yet.

    free + used (sequences, leases and quarantine together) = total blocks; `cached_blocks` is the part of `free`
    that still holds a reusable prefix.
    """

    queued_tokens: int = 0
    waiting: int = 0
    running: int = 0
    reserved: int = 0
    leases: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    step_s: float = 0.0  # moving average of the latest steps
    preemptions: int = 0
    expired_leases: int = 0
