"""What a membership can hold: `cluster.dispatch.capacity`."""

from cluster.dispatch.capacity import ServingCapacity, serving_capacity, sized
from cluster.spec import PoolSpec, Role
from diptych.view import WorkerState, WorkerView
from workers.config import EngineConfig

POOLS = (
    PoolSpec("prefill", Role.PREFILL),
    PoolSpec("decode", Role.DECODE, engine=EngineConfig(max_running=8)),
    PoolSpec("mixed", Role.MIXED, engine=EngineConfig(max_running=4)),
)


def worker(pool: str, role: Role, tokens: int, state: WorkerState = WorkerState.READY) -> WorkerView:
    return WorkerView(f"{pool}-0", pool, role, state, capacity_tokens=tokens)


def test_the_longest_sequences_are_those_of_the_largest_workers() -> None:
    workers = [
        worker("prefill", Role.PREFILL, 100),
        worker("decode", Role.DECODE, 300),
        worker("mixed", Role.MIXED, 200),
    ]
    assert serving_capacity(POOLS, workers) == ServingCapacity(200, 300, decode_slots=12, ready_to_decode=2)


def test_what_no_worker_has_told_is_unknown() -> None:
    starting = [worker("prefill", Role.PREFILL, 0, WorkerState.STARTING)]
    assert serving_capacity(POOLS, starting) == ServingCapacity(None, None, decode_slots=12, ready_to_decode=0)


def test_a_worker_that_a_new_controller_has_not_reached_has_the_capacity_of_its_pool() -> None:
    workers = [worker("prefill", Role.PREFILL, 100), worker("prefill", Role.PREFILL, 0, WorkerState.STARTING)]
    assert [each.capacity_tokens for each in sized(workers)] == [100, 100]
    workers.append(worker("decode", Role.DECODE, 0, WorkerState.STARTING))
    assert [each.capacity_tokens for each in sized(workers)] == [100, 100, 0]
    assert serving_capacity(POOLS, sized(workers)).prefill_tokens is None, "the decode pool may hold more"


def test_workers_that_flipped_to_decode_add_their_slots() -> None:
    workers = [worker("decode", Role.DECODE, 300), worker("decode", Role.DECODE, 300)]
    assert serving_capacity(POOLS, workers).decode_slots == 16
