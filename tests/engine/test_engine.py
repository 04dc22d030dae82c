"""The engine: batching, KV handoff, leases, preemption and endings, block for block."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvtransfer.errors import LeaseLost
from tests.engine.driving import (
    VOCAB,
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
from tests.examples import examples
from workers.engine.sequence import Lease
from workers.errors import InvalidRequest, Overloaded, UnknownSequence
from workers.request import FailedOut, FinishReason, TokenLogprobs, TokensOut


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    subject = engine()
    subject.add(request("a", tuple(range(1, 41)), max_tokens=2), 0.0, hold=False)
    plans = []
    while (plan := step(subject)[0]) is not None:
        plans.append(plan)
    assert [plan.num_tokens for plan in plans] == [16, 16, 8, 1]
    assert [chunk.draw is not None for plan in plans for chunk in plan.chunks] == [False, False, True, True]


def test_decodes_go_first_and_prompts_fill_the_budget() -> None:
    subject = engine(max_batch_tokens=8)
    subject.add(request("a", (1, 2, 3)), 0.0, hold=False)
    step(subject)
    subject.add(request("b", tuple(range(1, 21))), 0.0, hold=False)
    plan, _ = planned(subject)
    assert [(chunk.key, len(chunk.tokens)) for chunk in plan.chunks] == [("a/0", 1), ("b/0", 7)]


def test_positions_count_up_and_the_last_token_says_why() -> None:
    subject = engine()
    subject.add(request("a", (5, 6, 7), max_tokens=5), 0.0, hold=False)
    outputs = [each for each in run_to_end(subject) if isinstance(each, TokensOut)]
    assert [each.first_position for each in outputs] == [0, 1, 2, 3, 4]
    assert [each.tokens[0] for each in outputs] == [next_token("a/0", 3 + n) for n in range(5)]
    assert [each.finish for each in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert outputs[0].prefilled and not any(each.prefilled for each in outputs[1:])


def test_a_held_prompt_keeps_its_blocks_until_its_reader_releases_them() -> None:
    subject = engine()
    subject.add(request("a", tuple(range(1, 11))), 0.0, hold=True)
    _, emitted = step(subject)
    lease = next(each for each in emitted if isinstance(each, Lease))
    assert len(lease.blocks) == 3 and subject.stats().leases == 1
    progress = subject.leases.progress("a/0", lease.epoch, 0, 1.0)
    assert progress.finished and progress.ready_blocks == 3
    assert progress.cells == (tuple(map(digest_of, lease.blocks, (4, 4, 2))),)
    subject.leases.release("a/0", lease.epoch)
    subject.check()
    assert subject.stats().free_blocks == subject.stats().total_blocks


def test_the_watermark_moves_with_every_chunk() -> None:
    subject = engine(max_batch_tokens=8)
    subject.add(request("a", tuple(range(1, 21))), 0.0, hold=True)
    _, emitted = step(subject)
    lease = next(each for each in emitted if isinstance(each, Lease))
    ready = [subject.leases.progress("a/0", lease.epoch, 0, 0.0).ready_blocks]
    for _ in range(2):
        step(subject)
        ready.append(subject.leases.progress("a/0", lease.epoch, 0, 0.0).ready_blocks)
    assert ready == [2, 4, 5]


def test_an_expired_lease_returns_its_blocks_and_fences_its_reader() -> None:
    subject = engine()
    subject.add(request("a", tuple(range(1, 11))), 0.0, hold=True)
    _, emitted = step(subject)
    epoch = next(each for each in emitted if isinstance(each, Lease)).epoch
    subject.expire(9.9)
    subject.leases.progress("a/0", epoch, 0, 9.9)  # a heartbeat
    subject.expire(19.8)
    assert subject.stats().leases == 1
    subject.expire(20.0)
    subject.check()
    assert subject.stats().leases == 0 and subject.stats().expired_leases == 1
    with pytest.raises(LeaseLost):
        subject.leases.release("a/0", epoch)


def test_a_prompt_fails_when_its_lease_expires() -> None:
    subject = engine(max_batch_tokens=8)
    subject.add(request("a", tuple(range(1, 21))), 0.0, hold=True)
    step(subject)
    subject.expire(60.0)
    assert [type(each) for each in subject.drain()] == [FailedOut]
    subject.check()
    assert subject.stats().free_blocks == subject.stats().total_blocks


@pytest.mark.parametrize("hold", [False, True])
def test_a_request_without_finite_logits_fails_alone_and_its_kv_is_not_cached(hold: bool) -> None:
    subject = engine()
    subject.add(request("ill", tuple(range(1, 11))), 0.0, hold=hold)
    subject.add(request("well", (1, 2, 3), max_tokens=1), 0.0, hold=False)
    plan = subject.schedule(0.0)
    assert plan is not None
    made = result(plan)
    tokens = tuple(
        None if chunk.key == "ill/0" else token for chunk, token in zip(plan.chunks, made.tokens, strict=True)
    )
    subject.commit(plan, structs.replace(made, tokens=tokens), 0.0)
    emitted = {each.key: each for each in subject.drain() if not isinstance(each, Lease)}
    ill, well = emitted["ill/0"], emitted["well/0"]
    assert isinstance(ill, FailedOut) and ill.final and "logits are not finite behind token 10" in ill.reason
    assert isinstance(well, TokensOut) and well.finish is FinishReason.LENGTH
    subject.check()
    stats = subject.stats()
    assert (stats.non_finite, stats.free_blocks, stats.cached_blocks) == (1, stats.total_blocks, 0)


def test_prompt_logprobs_that_are_not_finite_fail_the_request() -> None:
    subject = engine()
    asked = request("a", (1, 2, 3))
    subject.add(replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0)), 0.0, hold=False)
    plan = subject.schedule(0.0)
    assert plan is not None
    made = result(plan)
    scored = ((TokenLogprobs(-1.0), TokenLogprobs(float("nan"))),)
    subject.commit(plan, structs.replace(made, prompt_logprobs=scored), 0.0)
    assert [type(each) for each in subject.drain()] == [FailedOut]
    subject.check()


def test_a_new_hold_of_the_same_key_fences_the_old_reader() -> None:
    subject = engine()
    subject.add(request("a", (1, 2, 3, 4, 5)), 0.0, hold=True)
    _, emitted = step(subject)
    old = next(each for each in emitted if isinstance(each, Lease)).epoch
    subject.add(request("a", (1, 2, 3, 4, 5)), 0.0, hold=True)
    _, emitted = step(subject)
    new = next(each for each in emitted if isinstance(each, Lease)).epoch
    assert new > old
    with pytest.raises(LeaseLost, match="epoch"):
        subject.leases.progress("a/0", old, 0, 0.0)


def test_a_decode_starts_once_its_kv_and_first_token_are_there() -> None:
    subject = engine()
    subject.reservations.reserve(request("a", (1, 2, 3, 4, 5), max_tokens=3), 0.0)
    assert step(subject)[0] is None
    subject.reservations.decode("a/0", [77], 1.0)
    assert step(subject)[0] is None
    subject.reservations.fetched("a/0", 3.0)
    plan, emitted = planned(subject, 4.0)
    (out,) = answers(emitted)
    assert plan.chunks[0].tokens == (77,) and plan.chunks[0].first_position == 5
    assert (out.timing.wait_s, out.timing.queue_s) == (2.0, 1.0)
    assert out.first_position == 1
    assert answers(run_to_end(subject, 5.0))[-1].finish is FinishReason.LENGTH
    assert subject.stats().free_blocks == subject.stats().total_blocks


def test_the_prefix_a_decode_worker_already_has_is_not_moved_again() -> None:
    subject = engine()
    subject.reservations.reserve(request("a", tuple(range(1, 13))), 0.0)
    subject.reservations.fetched("a/0", 0.0)
    subject.sequences.abort("a/0")
    again = subject.reservations.reserve(request("b", (*range(1, 9), 500, 501)), 0.0)
    assert again.cached_tokens == 8 and again.num_blocks == 3


def test_a_prefix_counts_up_to_a_multiple_of_the_tokens_that_both_sides_can_begin_at() -> None:
    subject = engine(prefix_tokens=6)  # blocks of 4 here and of 6 there: 12
    for name, prompt, cached in (("a", 18, 0), ("b", 11, 0), ("c", 12, 12), ("d", 18, 12)):
        reservation = subject.reservations.reserve(request(name, tuple(range(1, prompt + 1))), 0.0)
        assert (reservation.cached_tokens, reservation.num_blocks) == (cached, -(-prompt // 4)), name
        subject.check()
        subject.reservations.fetched(f"{name}/0", 0.0)
        subject.sequences.abort(f"{name}/0")
    subject.check()


def test_a_shared_prefix_is_digested_for_each_prompt_that_waits_for_it_and_once_only() -> None:
    """The second is admitted while the first's digests are known; its own tail is all that is left to digest."""
    subject = engine()
    subject.add(request("a", tuple(range(1, 11))), 0.0, hold=True)
    plan, _ = planned(subject)
    assert [slots for _, slots in plan.digest_blocks] == [4, 4, 2]
    subject.add(request("b", (*range(1, 9), 50, 51, 52)), 0.0, hold=True)
    plan, emitted = planned(subject)
    lease = next(each for each in emitted if isinstance(each, Lease))
    assert plan.digest_blocks == ((lease.blocks[2], 3),)
    cells = tuple(map(digest_of, lease.blocks, (4, 4, 3)))
    assert subject.leases.progress("b/0", lease.epoch, 0, 0.0).cells == (cells,)


def test_a_reservation_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    subject = engine(staging_blocks=4)
    subject.reservations.reserve(request("a", tuple(range(1, 13))), 0.0)
    with pytest.raises(Overloaded):
        subject.reservations.reserve(request("b", tuple(range(1, 13))), 0.0)
    subject.check()
    subject.sequences.abort("a/0")
    subject.reservations.reserve(request("b", tuple(range(1, 13))), 0.0)


def test_blocks_of_an_aborted_fetch_stay_quarantined_until_it_settles() -> None:
    subject = engine()
    subject.reservations.reserve(request("a", tuple(range(1, 13))), 0.0)
    blocks = tuple(subject.reservations.get("a/0").blocks)
    subject.pool.begin_transfer(blocks)
    subject.sequences.abort("a/0")
    subject.check()
    assert subject.stats().quarantined_blocks == 3
    assert subject.stats().free_blocks == subject.stats().total_blocks - 3
    subject.pool.end_transfer(blocks)
    subject.check()
    assert subject.stats().free_blocks == subject.stats().total_blocks


def test_an_abort_during_a_step_waits_for_the_step() -> None:
    subject = engine()
    subject.add(request("a", (1, 2, 3)), 0.0, hold=False)
    plan = scheduled(subject)
    assert subject.sequences.abort("a/0")
    assert subject.stats().free_blocks < subject.stats().total_blocks
    subject.commit(plan, result(plan), 0.0)
    subject.check()
    assert subject.drain() == [] and subject.stats().free_blocks == subject.stats().total_blocks
    assert not subject.sequences.abort("a/0")


@pytest.mark.parametrize(
    ("prompt", "field"), [((), "prompt"), (tuple(range(1, 200)), "prompt"), ((1, VOCAB), "prompt"), ((-1,), "prompt")]
)
def test_impossible_prompts_are_refused(prompt: tuple[int, ...], field: str) -> None:
    subject = engine()
    for take in (lambda r: subject.add(r, 0.0, hold=False), lambda r: subject.reservations.reserve(r, 0.0)):
        with pytest.raises(InvalidRequest) as caught:
            take(request("a", prompt))
        assert caught.value.field == field
    subject.check()


def test_calls_about_unknown_sequences_say_so() -> None:
    subject = engine()
    with pytest.raises(UnknownSequence):
        subject.reservations.decode("nobody/0", [1], 0.0)
    with pytest.raises(UnknownSequence):
        subject.reservations.fetched("nobody/0", 0.0)
    assert not subject.sequences.abort("nobody/0")


def test_a_resumed_request_counts_on_from_what_the_client_has() -> None:
    subject = engine()
    subject.add(request("a", (1, 2, 3), max_tokens=5, generated=(8, 9), attempt=1), 0.0, hold=False)
    outputs = answers(run_to_end(subject))
    assert [each.first_position for each in outputs] == [2, 3, 4]
    assert outputs[-1].finish is FinishReason.LENGTH


def test_out_of_blocks_the_youngest_is_preempted_and_still_gets_the_same_tokens() -> None:
    subject = engine(kv_blocks=10, max_batch_tokens=16)  # 8 usable blocks of 4
    for index in range(3):
        subject.add(request(f"r{index}", (1 + index,) * 5, max_tokens=10), float(index), hold=False)
    emitted = run_to_end(subject)
    assert subject.stats().preemptions > 0
    for index in range(3):
        key = f"r{index}/0"
        assert tokens_of(emitted, key) == [next_token(key, 5 + n) for n in range(10)]
        assert [e.first_position for e in answers(emitted) if e.key == key] == list(range(10))


@examples(60)
@given(st.data())
def test_whatever_happens_no_block_is_lost_and_no_token_doubled(data: st.DataObject) -> None:
    subject = engine(kv_blocks=data.draw(st.integers(8, 34)), max_batch_tokens=data.draw(st.integers(8, 20)))
    now, count, emitted = 0.0, 0, []
    reading: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(5, 60))):
        now += data.draw(st.sampled_from([0.0, 0.1, 3.0]))
        action = data.draw(
            st.sampled_from(["add", "hold", "reserve", "step", "step", "step", "abort", "fetch", "expire"])
        )
        key = f"r{data.draw(st.integers(0, max(0, count - 1)))}/0"
        if action in ("add", "hold", "reserve"):
            length = data.draw(st.integers(1, 24))
            made = request(f"r{count}", tuple(data.draw(st.integers(1, 2)) for _ in range(length)))
            count += 1
            try:
                if action == "reserve":
                    subject.reservations.reserve(made, now)
                else:
                    subject.add(made, now, hold=action == "hold")
            except (Overloaded, InvalidRequest):
                count -= 1
        elif action == "step":
            emitted += step(subject, now)[1]
        elif action == "abort":
            subject.sequences.abort(key)
        elif action == "expire":
            subject.expire(now)
        elif action == "fetch":
            try:
                blocks = tuple(subject.reservations.get(key).blocks)
                subject.pool.begin_transfer(blocks)
                reading.append(blocks)
                if data.draw(st.booleans()):
                    subject.reservations.fetched(key, now)
                    subject.reservations.decode(key, [5], now)
            except (UnknownSequence, InvalidRequest):
                pass
            lands = bool(reading) and data.draw(st.booleans())
            if lands:
                subject.pool.end_transfer(reading.pop(0))
        subject.check()
    for blocks in reading:
        subject.pool.end_transfer(blocks)
    for index in range(count):
        subject.sequences.abort(f"r{index}/0")
    subject.expire(now + 100.0)
    emitted += run_to_end(subject, now)
    subject.check()
    assert subject.stats().free_blocks == subject.stats().total_blocks
    for key in {each.key for each in emitted if isinstance(each, TokensOut)}:
        positions = [each.first_position for each in emitted if isinstance(each, TokensOut) and each.key == key]
        assert positions == list(range(positions[0], positions[0] + len(positions)))


def test_a_reservation_waits_behind_earlier_prompts() -> None:
    subject = engine(kv_blocks=10)  # 8 usable blocks of 4
    subject.add(request("running", tuple(range(1, 13)), max_tokens=20), 0.0, hold=False)
    step(subject)
    subject.add(request("early", tuple(range(1, 30))), 1.0, hold=False)
    step(subject)
    with pytest.raises(Overloaded, match="earlier"):
        subject.reservations.reserve(request("late", (1, 2, 3)), 2.0)
    subject.sequences.abort("early/0")
    subject.reservations.reserve(request("late", (1, 2, 3)), 2.0)


def test_a_reservation_does_not_wait_for_later_prompts() -> None:
    subject = engine(kv_blocks=34, max_running=3)
    for name in ("first", "second"):
        subject.add(request(name, tuple(range(1, 33))), 1.0, hold=False)  # two steps each, one at a time
    step(subject)
    assert subject.stats().waiting, "one waits for the other's turn to be over"
    subject.reservations.reserve(request("late", (1, 2, 3)), 2.0)
    with pytest.raises(Overloaded, match="waited for"):
        subject.reservations.reserve(request("later", (4, 5, 6)), 2.0)
    subject.check()
