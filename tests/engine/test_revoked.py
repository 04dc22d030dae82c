"""Reservations that are revoked: prompts wait for their blocks, nothing runs, and their own prompts have not begun."""

from tests.engine.driving import engine, request, run_to_end, step
from workers.engine.engine import Engine
from workers.engine.reservations import REVOKE_S
from workers.request import FailedOut, Request


def prompt_of(name: str, blocks: int, attempt: int = 0) -> Request:
    """Of so many of the 32 blocks; no two begin alike."""
    return request(name, tuple(1 + (ord(name) + n) % 900 for n in range(4 * blocks)), attempt=attempt)


def starved(*reserved: Request, blocks: int = 18) -> Engine:
    """A prompt for another worker waits for reserved blocks from second 1 on."""
    subject = engine(staging_blocks=32)
    for number, each in enumerate(reserved):
        subject.reservations.reserve(each, 0.1 * number)
    subject.add(prompt_of("P", blocks), 1.0, hold=True)
    assert step(subject, 1.0) == (None, [])
    return subject


def revoked(subject: Engine, now_s: float = 1.0 + REVOKE_S) -> list[str]:
    return [each.key for each in step(subject, now_s)[1] if isinstance(each, FailedOut)]


def test_a_prompt_that_waited_gets_the_blocks_of_a_reservation_whose_prompt_has_not_begun() -> None:
    subject = starved(prompt_of("a", 18))
    assert subject.wakes_at_s == 1.0 + REVOKE_S
    assert revoked(subject, 0.9 + REVOKE_S) == []
    plan, emitted = step(subject, 1.0 + REVOKE_S)
    assert plan is not None and plan.chunks[0].key == "P/0"
    assert FailedOut("a/0", "its reservation was revoked: prompts waited 2 s for its blocks") in emitted
    run_to_end(subject, 5.0)
    subject.sequences.abort("P/0")
    assert not subject.has_work and subject.stats().free_blocks == subject.stats().total_blocks


def test_as_few_as_needed_are_revoked_first_those_with_the_fewest_attempts_and_of_these_the_newest() -> None:
    names = [prompt_of("a", 6), prompt_of("b", 6), prompt_of("c", 6, attempt=1)]
    assert revoked(starved(*names, blocks=20)) == ["b/0"]
    assert revoked(starved(*names, blocks=21)) == ["b/0", "a/0"]


def test_what_arrives_is_not_revoked_nor_anything_beside_what_runs() -> None:
    subject = starved(prompt_of("a", 18))
    subject.reservations.begin_fetch("a/0")
    assert revoked(subject) == [] and subject.wakes_at_s > 1.0 + REVOKE_S
    subject = starved(prompt_of("a", 18))
    subject.add(prompt_of("q", 2), 0.5, hold=False)
    subject._scheduler.queues.waiting.rotate()  # before the one that waits
    assert step(subject, 1.5)[0] is not None and subject.stats().running == 1
    assert revoked(subject, 2.0 + REVOKE_S) == []


def test_nothing_is_revoked_if_that_is_not_enough() -> None:
    subject = starved(prompt_of("a", 10), prompt_of("b", 10), blocks=30)
    subject.reservations.begin_fetch("a/0")
    assert revoked(subject) == []
