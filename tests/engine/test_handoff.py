"""Sequences that another engine continues: cut prompts, migrating decodes, and what the target computes itself."""

import pytest

from kvtransfer.errors import LeaseLost
from tests.engine.driving import (
    Device,
    answers,
    digest_of,
    engine,
    next_token,
    planned,
    request,
    result,
    run_to_end,
    scheduled,
    step,
    tokens_of,
)
from workers.engine.blocks import BlockPool
from workers.engine.leases import LeaseManager
from workers.engine.sequence import Lease
from workers.errors import InvalidRequest, UnknownSequence
from workers.request import HeadOut


def test_the_head_of_a_cut_prompt_is_held_and_no_token_is_sampled() -> None:
    subject = engine(max_batch_tokens=8)
    subject.add(request("a", tuple(range(1, 31))), 0.0, hold=True, cut_tokens=18)
    emitted = run_to_end(subject)
    lease, head = emitted[0], emitted[-1]
    assert isinstance(lease, Lease) and isinstance(head, HeadOut)
    assert (lease.num_tokens, len(lease.blocks)) == (18, 5) and not tokens_of(emitted, "a/0")
    progress = subject.leases.progress("a/0", lease.epoch, 0, 0.0)
    assert progress.finished and progress.cells == (tuple(map(digest_of, lease.blocks, (4, 4, 4, 4, 2))),)
    subject.leases.release("a/0", lease.epoch)
    assert subject.stats().free_blocks == subject.stats().total_blocks


@pytest.mark.parametrize(("hold", "cut"), [(False, 5), (True, 10), (True, -1)])
def test_an_invalid_cut_is_refused(hold: bool, cut: int) -> None:
    with pytest.raises(InvalidRequest, match="cut_tokens"):
        engine().add(request("a", tuple(range(1, 11))), 0.0, hold=hold, cut_tokens=cut)


@pytest.mark.parametrize("arrived", [0, 3, 4, 9, 10])
def test_the_reader_of_a_head_computes_the_tail_and_samples(arrived: int) -> None:
    subject, device = engine(), Device()
    sequence = device.know(request("a", tuple(range(1, 11)), max_tokens=3))
    subject.reservations.reserve(sequence, 0.0)
    device.fill(tuple(subject.reservations.get("a/0").blocks), sequence.prompt[:arrived])
    subject.reservations.fetched("a/0", 1.0, num_tokens=arrived, starts_decoding=True)
    plan, emitted = planned(subject, 2.0, device)
    assert len(plan.chunks[0].tokens) == max(1, 10 - arrived)
    (out,) = answers(emitted)
    assert out.prefilled and out.timing.queue_s == 1.0
    assert tokens_of([*emitted, *run_to_end(subject, 3.0, device)], "a/0") == [
        next_token("a/0", 10 + n) for n in range(3)
    ]


def test_a_cached_prefix_longer_than_the_cut_is_not_computed_again() -> None:
    subject, device = engine(), Device()
    subject.add(device.know(request("warm", tuple(range(1, 15)), max_tokens=1)), 0.0, hold=False)
    run_to_end(subject, 0.0, device)
    sequence = device.know(request("a", tuple(range(1, 15))))
    assert subject.reservations.reserve(sequence, 0.0).cached_tokens == 12
    subject.reservations.fetched("a/0", 1.0, num_tokens=7, starts_decoding=True)
    plan, _ = planned(subject, 2.0, device)
    assert [(chunk.first_position, len(chunk.tokens)) for chunk in plan.chunks] == [(12, 2)]


def test_a_migrating_decode_continues_and_digests_its_blocks_in_later_steps() -> None:
    """At most as many in a step as a prompt's chunk has."""
    subject, device = engine(max_batch_tokens=8), Device()
    subject.add(device.know(request("a", tuple(range(1, 23)), max_tokens=12)), 0.0, hold=False)
    emitted = [each for _ in range(5) for each in step(subject, 0.0, device)[1]]
    lease = subject.sequences.offer_migration("a/0", 100, 0.0)
    assert lease is not None and lease.num_tokens == 24
    ready = [subject.leases.progress("a/0", lease.epoch, 0, 0.0).ready_blocks]
    for _ in range(3):
        emitted += step(subject, 0.0, device)[1]
        ready.append(subject.leases.progress("a/0", lease.epoch, 0, 0.0).ready_blocks)
    progress = subject.leases.progress("a/0", lease.epoch, 0, 0.0)
    assert ready == [0, 2, 4, 6] and progress.finished
    assert progress.cells == (tuple(digest_of(block, 4) for block in lease.blocks),)
    subject.leases.release("a/0", lease.epoch)
    emitted += run_to_end(subject, 0.0, device)
    assert tokens_of(emitted, "a/0") == [next_token("a/0", 22 + n) for n in range(12)]
    assert subject.stats().free_blocks == subject.stats().total_blocks


def test_without_digests_an_offer_is_complete_at_once() -> None:
    pool = BlockPool(8, 4)
    leases = LeaseManager(pool, 10.0, digest=False)
    blocks = pool.allocate(3)
    pool.share(blocks)
    lease = leases.offer("a/0", blocks, 0.0)
    progress = leases.progress("a/0", lease.epoch, 0, 0.0)
    assert (progress.ready_blocks, progress.finished, progress.cells) == (3, True, ())
    pool.free(blocks)
    assert pool.num_free == 5, "the reader still reads them"
    leases.release("a/0", lease.epoch)
    assert pool.num_free == 8


def test_a_decode_continues_when_its_offer_ends() -> None:
    subject = engine()
    subject.add(request("a", tuple(range(1, 11)), max_tokens=9), 0.0, hold=False)
    step(subject)
    lease = subject.sequences.offer_migration("a/0", 100, 0.0)
    assert lease is not None
    subject.expire(60.0)
    with pytest.raises(LeaseLost):
        subject.leases.release("a/0", lease.epoch)
    assert len(tokens_of(run_to_end(subject), "a/0")) == 8


def test_preemption_and_the_last_token_end_an_offer() -> None:
    subject = engine(kv_blocks=10)
    for index in range(3):
        subject.add(request(f"r{index}", (1 + index,) * 5, max_tokens=10), float(index), hold=False)
    step(subject)
    lease = subject.sequences.offer_migration("r2/0", 100, 0.0)
    assert lease is not None
    while not subject.stats().preemptions:
        step(subject)
    with pytest.raises(LeaseLost):
        subject.leases.progress("r2/0", lease.epoch, 0, 0.0)
    assert subject.sequences.offer_migration("r2/0", 100, 0.0) is None
    assert subject.sequences.offer_migration("r0/0", 100, 0.0) is not None
    run_to_end(subject)
    assert not len(subject.leases)
    with pytest.raises(UnknownSequence):
        subject.sequences.offer_migration("r0/0", 100, 0.0)


def test_tokens_sampled_elsewhere_are_computed_before_decoding_continues() -> None:
    """More tokens than the blocks that were reserved hold, and nothing free at first: they come one by one."""
    subject, device = engine(kv_blocks=10), Device()
    sequence = device.know(request("a", tuple(range(1, 11)), max_tokens=16))
    subject.reservations.reserve(sequence, 0.0)
    device.fill(tuple(subject.reservations.get("a/0").blocks), sequence.prompt[:8])
    subject.reservations.fetched("a/0", 1.0, num_tokens=8)
    subject.reservations.decode("a/0", [next_token("a/0", 10 + n) for n in range(11)], 1.0)
    taken = subject.pool.allocate(subject.pool.num_free - 1)
    plan = scheduled(subject, 2.0)
    assert len(plan.chunks[0].tokens) == 4, "up to the end of its third block"
    device.execute(plan)
    subject.commit(plan, result(plan), 2.0)
    subject.pool.free(taken)
    assert tokens_of(run_to_end(subject, 3.0, device), "a/0") == [next_token("a/0", 21 + n) for n in range(5)]
