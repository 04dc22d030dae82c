"""What the workers of a membership can hold. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from cluster.spec import PoolSpec, Role
from diptych.view import WorkerState, WorkerView


@dataclass(frozen=True, slots=True)
class ServingCapacity:
    """Tokens of the longest sequence that a prefill and a decode worker can hold; None while it is not known.

    `decode_slots`: most sequences that can decode at once, on the current workers and roles or on the pools at their
    maximum. `ready_to_decode`: workers that are ready for it.
    """

    prefill_tokens: int | None
    decode_tokens: int | None
    decode_slots: int
    ready_to_decode: int


def sized(workers: Iterable[WorkerView]) -> tuple[WorkerView, ...]:
    """The workers. One that starts, or that a new controller has not reached yet, has the capacity of others in its
    pool; 0: that of none of them is known.
    """
    workers = tuple(workers)
    known = {each.pool: each.capacity_tokens for each in workers if each.capacity_tokens}
    return tuple(
        each if each.capacity_tokens else structs.replace(each, capacity_tokens=known.get(each.pool, 0))
        for each in workers
    )


def serving_capacity(pools: Sequence[PoolSpec], workers: Iterable[WorkerView], together: int = 0) -> ServingCapacity:
    """`workers`: as `sized`. `together`: tokens of the longest sequence that several workers can hold together."""
    slots = {pool.name: pool.engine.max_running for pool in pools}
    tokens = {Role.PREFILL: 0, Role.DECODE: 0, Role.MIXED: 0}
    decoding = ready = 0
    is_known = True
    for worker in workers:
        is_known &= worker.capacity_tokens > 0
        tokens[worker.role] = max(tokens[worker.role], worker.capacity_tokens)
        if worker.role is not Role.PREFILL:
            decoding += slots.get(worker.pool, 0)
            ready += worker.state is WorkerState.READY
    maximum = sum(pool.bounds[1] * slots[pool.name] for pool in pools if pool.role is not Role.PREFILL)
    alone = (max(tokens[role], tokens[Role.MIXED]) for role in (Role.PREFILL, Role.DECODE))
    prefill, decode = (max(each, together) or None if is_known else None for each in alone)
    return ServingCapacity(prefill, decode, max(decoding, maximum), ready)
