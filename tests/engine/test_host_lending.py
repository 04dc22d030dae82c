"""Prefixes in host memory that are restored for a reader on another worker."""

import pytest

from kvtransfer.errors import LeaseLost
from tests.engine.driving import Device, digest_of, planned, request, result, run_to_end, scheduled, step
from tests.engine.test_host_cache import answer, prompt, small
from workers.engine.engine import Engine
from workers.engine.sequence import Lease

TURN = prompt(100)  # ten blocks of sixteen


def evicted(*, digest: bool = True, first: tuple[int, ...] = TURN) -> tuple[Engine, Device]:
    """An idle engine with this prompt in host memory alone."""
    subject, device = small()
    subject.leases._digest = digest
    answer(subject, device, request("r0", first, max_tokens=1))
    for number in (300, 500):
        answer(subject, device, request(f"r{number}", prompt(number), max_tokens=1))
    return subject, device


def held(subject: Engine, device: Device, key: str = "next", have: int | None = 0) -> Lease:
    """A lease whose reader has asked; None: not yet."""
    made = device.know(request(key, TURN))
    lease = subject.prefix_fetches.hold(f"{made.key}:prefix", made.prompt, 0.0)
    assert lease is not None
    if have is not None:
        assert subject.leases.progress(lease.key, lease.epoch, have, 0.0).ready_blocks == have
    return lease


def is_idle(subject: Engine) -> bool:
    subject.check()
    return subject.stats().free_blocks == subject.stats().total_blocks and not subject.pool.host._held


@pytest.mark.parametrize("digest", [True, False])
def test_an_idle_owner_restores_what_a_reader_lacks_and_digests_it(digest: bool) -> None:
    """Half of its sixteen free blocks, and four in a step, as a prompt's chunk has."""
    subject, device = evicted(digest=digest)
    lease = held(subject, device)
    assert lease.num_tokens == 32
    for number in (1, 2):
        plan, _ = planned(subject, 0.0, device)
        assert len(plan.swap_in) == 4 and len(plan.digest_blocks) == 4 * digest and not plan.chunks
        mark = subject.leases.progress(lease.key, lease.epoch, 0, 0.0)
        assert (mark.ready_blocks, mark.finished) == (4 * number, number == 2)
    assert step(subject, 0.0, device) == (None, [])
    if digest:
        assert mark.cells == (tuple(digest_of(block, 4) for block in lease.blocks),)
    subject.leases.release(lease.key, lease.epoch)
    assert is_idle(subject)
    assert subject.stats().tiers[0].lent_tokens == 32 and not subject.stats().device_lent_tokens
    computed, cached, _ = answer(subject, device, request("again", TURN, max_tokens=1))
    assert (computed, cached) == (4, 36) and subject.stats().tiers[0].hit_tokens == 4, "the others are cached again"


def test_what_the_reader_has_is_not_restored() -> None:
    subject, device = evicted()
    lease = held(subject, device, have=5)
    plan, _ = planned(subject)
    assert [block for _, block in plan.swap_in] == [block for block, _ in plan.digest_blocks] == list(lease.blocks[5:])
    assert subject.leases.progress(lease.key, lease.epoch, 5, 0.0).finished
    subject.leases.release(lease.key, lease.epoch)
    assert is_idle(subject)


def test_nothing_is_restored_before_the_reader_comes() -> None:
    subject, device = evicted()
    held(subject, device, have=None)
    assert step(subject) == (None, [])
    subject.expire(60.0)
    assert is_idle(subject) and subject.stats().expired_leases == 1


def test_readers_together_hold_half_of_the_free_blocks_at_most() -> None:
    subject, device = evicted()
    leases = [held(subject, device, "first", have=None)]
    assert subject.prefix_fetches.hold("second:prefix", TURN, 0.0) is None
    subject.leases.release(leases[0].key, leases[0].epoch)
    taken = subject.pool.allocate(11)
    assert held(subject, device).num_tokens == 8
    subject.pool.free(taken)


def test_a_running_decode_takes_the_blocks_of_readers_and_is_not_preempted() -> None:
    subject, device = evicted()
    subject.add(device.know(request("decodes", (900,) * 26, max_tokens=30)), 0.0, hold=False)
    planned(subject, 0.0, device)
    lease = held(subject, device)
    assert lease.num_tokens > 0
    run_to_end(subject, 0.0, device)
    assert subject.stats().preemptions == 0
    with pytest.raises(LeaseLost):
        subject.leases.progress(lease.key, lease.epoch, 0, 0.0)
    assert is_idle(subject)


def test_blocks_are_not_given_away_before_the_step_that_restores_them_has_ended() -> None:
    subject, device = evicted()
    lease = held(subject, device)
    plan = scheduled(subject)
    subject.leases.drop(lease.key)
    subject.check()
    targets = {block for _, block in plan.swap_in}
    taken = subject.pool.allocate(subject.pool.num_free)
    assert targets and not targets & set(taken)
    subject.pool.free(taken)
    device.execute(plan)
    subject.commit(plan, result(plan), 0.0)
    assert is_idle(subject)


@pytest.mark.parametrize("digest", [True, False])
def test_a_failed_step_withdraws_the_lease_and_caches_nothing_of_it(digest: bool) -> None:
    subject, device = evicted(digest=digest)
    lease = held(subject, device)
    plan = scheduled(subject)
    subject.steps_failed([plan], "a test")
    with pytest.raises(LeaseLost):
        subject.leases.progress(lease.key, lease.epoch, 0, 0.0)
    assert is_idle(subject) and subject.stats().cached_blocks == 0


def test_content_that_is_forgotten_while_it_is_restored_is_not_cached() -> None:
    subject, device = evicted()
    lease = held(subject, device)
    plan = scheduled(subject)
    before = subject.stats().cached_blocks
    subject.pool.host.clear()
    device.execute(plan)
    subject.commit(plan, result(plan), 0.0)
    subject.leases.drop(lease.key)
    assert is_idle(subject) and subject.stats().cached_blocks == before
