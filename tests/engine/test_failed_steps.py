"""Unexpected errors: a request's error fails that request, a step's error its requests; all others continue exactly."""

import asyncio
import random
from typing import Any

import pytest

from tests.engine.driving import Device, engine, next_token, request, result, run_to_end, step, tokens_of
from workers.costs import LinearCost
from workers.engine.engine import Engine, EngineOutput
from workers.engine.engine_loop import MAX_FAILURES, EngineLoop
from workers.engine.reservation_queue import ReservationQueue
from workers.engine.sequence import Sequence
from workers.engine.step import StepPlan, StepResult
from workers.errors import InvalidRequest
from workers.request import FailedOut

COST = LinearCost(0.0, 0.001, 0.0, 0.001, 0.0, 0.0, 1e-9)


def failed(emitted: list[EngineOutput]) -> set[str]:
    return {each.key for each in emitted if isinstance(each, FailedOut)}


def expected(key: str, length: int, count: int = 8) -> list[int]:
    return [next_token(key, length + n) for n in range(count)]


class Computes:
    """An executor that fails the steps for which `fails` returns an error. A depth of 0: of 1, and it runs ahead."""

    def __init__(self, fails: object, depth: int = 1) -> None:
        self.depth = max(1, depth)
        self.runs_ahead = not depth
        self.fails = fails
        self.steps = 0

    async def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        await asyncio.sleep(0)
        if error := self.fails(plan):  # type: ignore[operator]
            raise error
        return result(plan)


async def pumped(subject: Engine, executor: Computes) -> list[EngineOutput]:
    """Run until nothing is left to do."""
    emitted: list[EngineOutput] = []
    engine_loop = EngineLoop(subject, executor, emitted.extend, lambda: 0.0)  # type: ignore[arg-type]
    pumping = asyncio.ensure_future(engine_loop.run())
    async with asyncio.timeout(20.0):
        while subject.has_work and not pumping.done():
            await asyncio.sleep(0)
        engine_loop.stop()
        await pumping
    subject.check()
    return emitted


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("error", [MemoryError(), ValueError("x"), TypeError("x"), RuntimeError("x")])
async def test_a_failed_step_fails_its_sequences_and_no_others(depth: int, error: Exception) -> None:
    subject = engine(depth=max(1, depth), max_running=2)
    for name in "abcd":
        subject.add(request(name, (1, 2, 3, 4, 5)), 0.0, hold=False)
    emitted = await pumped(subject, Computes(lambda plan: error if plan.number == 4 else None, depth))
    ended = failed(emitted)
    assert ended and "d/0" not in ended
    for name in "abcd":
        if f"{name}/0" not in ended:
            assert tokens_of(emitted, f"{name}/0") == expected(f"{name}/0", 5)
    assert all(type(error).__name__ in each.reason for each in emitted if isinstance(each, FailedOut))


async def test_a_device_that_fails_every_step_makes_its_worker_unfit() -> None:
    subject, executor = engine(max_running=1), Computes(lambda plan: RuntimeError("it is broken"))
    for index in range(2 * MAX_FAILURES):
        subject.add(request(f"r{index}", (1, 2)), 0.0, hold=False)
    with pytest.raises(RuntimeError, match="it is broken"):
        await pumped(subject, executor)
    assert executor.steps == MAX_FAILURES


async def test_a_failed_check_after_a_failed_step_makes_the_worker_unfit() -> None:
    subject = engine()
    subject.add(request("a", (1, 2)), 0.0, hold=False)

    def lose_a_block(plan: StepPlan) -> Exception:
        subject.pool.allocate(1)
        return RuntimeError("x")

    with pytest.raises(AssertionError, match="references"):
        await pumped(subject, Computes(lose_a_block))


async def test_an_error_while_a_chunk_is_built_fails_its_sequence_only(monkeypatch) -> None:
    draw = Sequence.draw

    def broken(self: Sequence, position: int, end_tokens: tuple[int, ...]):
        if self.key == "b/0" and self.num_output == 3:
            raise ValueError("no such draw")
        return draw(self, position, end_tokens)

    monkeypatch.setattr(Sequence, "draw", broken)
    subject = engine()
    for name in "abc":
        subject.add(request(name, (1, 2, 3, 4, 5)), 0.0, hold=False)
    emitted = await pumped(subject, Computes(lambda plan: None))
    assert failed(emitted) == {"b/0"}
    for key in ("a/0", "c/0"):
        assert tokens_of(emitted, key) == expected(key, 5)


async def test_an_error_while_a_token_is_committed_fails_its_sequence_only(monkeypatch) -> None:
    finish_reason = Sequence.finish_reason

    def broken(self: Sequence, end_tokens: tuple[int, ...]):
        if self.key == "b/0" and self.num_output == 3:
            raise MemoryError
        return finish_reason(self, end_tokens)

    monkeypatch.setattr(Sequence, "finish_reason", broken)
    subject = engine(depth=2)
    for name in "abc":
        subject.add(request(name, (1, 2, 3, 4, 5)), 0.0, hold=False)
    emitted = await pumped(subject, Computes(lambda plan: None, 2))
    assert failed(emitted) == {"b/0"}
    for key in ("a/0", "c/0"):
        assert tokens_of(emitted, key) == expected(key, 5)


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_error_during_admission_fails_that_prompt_only(depth: int) -> None:
    subject = engine(depth=max(1, depth))
    subject.add(request("a", (1, 2, 3, 4, 5)), 0.0, hold=False)
    step(subject)
    subject.add(request("b", (1.5,) * 8), 0.0, hold=False)  # type: ignore[arg-type]
    subject.add(request("c", (1, 2, 3, 4, 5)), 0.0, hold=False)
    emitted = await pumped(subject, Computes(lambda plan: None, depth))
    assert failed(emitted) - {"a/0"} == {"b/0"}, "a may be in the same step"
    assert tokens_of(emitted, "c/0") == expected("c/0", 5)


def test_a_step_that_fails_before_it_has_a_sequence_is_not_repeated_forever(monkeypatch) -> None:
    subject = engine()
    subject.add(request("a", (1, 2)), 0.0, hold=False)

    def broken(draft: object) -> None:
        raise RuntimeError("the policy is broken")

    monkeypatch.setattr(subject._scheduler._policy, "fill_step", broken)
    with pytest.raises(RuntimeError, match="the policy is broken"):
        subject.schedule(0.0)


@pytest.mark.parametrize("seed", range(8))
def test_survivors_of_any_failed_steps_attend_to_the_right_kv(seed: int) -> None:
    """Shared, copied, saved and cached blocks: the target of a copy in a failed step is never read."""
    draw, device = random.Random(seed), Device()
    sizes: dict[str, Any] = {"kv_blocks": 18, "host_cache_blocks": 24, "max_running": 6}
    subject = engine(cost=COST, block_bytes=1, **sizes)
    emitted: list[EngineOutput] = []
    lengths, copied = {}, 0
    for index in range(60):
        prompt = (*range(1, 5 + draw.randrange(4) * 4), draw.randrange(1, 4))
        wanted = device.know(request(f"r{index}", prompt, max_tokens=draw.randint(2, 14)))
        lengths[wanted.key] = len(prompt), wanted.sampling.max_tokens or 0
        subject.add(wanted, 0.0, hold=False)
        while len(subject._scheduler.queues.waiting) > 6 or index == 59:
            plan = subject.schedule(0.0)
            if plan is None:
                break
            copies = bool(plan.swap_out or plan.swap_in or plan.copies)
            copied += copies
            if draw.random() < (0.3 if copies else 0.02):
                subject.steps_failed([plan], "a step failed: RuntimeError: x")
            else:
                device.execute(plan)
                subject.commit(plan, result(plan), 0.0)
            subject.check()
            emitted += subject.drain()
    assert not subject.has_work and failed(emitted) and copied
    assert len(failed(emitted)) < len(lengths)
    for key, (length, count) in lengths.items():
        if key not in failed(emitted):
            assert tokens_of(emitted, key) == expected(key, length, count)


async def test_an_error_in_one_reservation_goes_to_its_caller_and_the_next_is_granted() -> None:
    subject = engine()
    reservations = ReservationQueue(subject, lambda request: None)
    bad = request("a", ("x", "y"))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await reservations.ask(bad, 1.0)
    assert (await reservations.ask(request("b", (1, 2)), 1.0)).num_blocks == 1


async def test_a_prompt_that_waits_for_room_is_hashed_once(monkeypatch) -> None:
    hashed: list[int] = []

    hash_tokens = Sequence.hash_tokens

    def counted(sequence, block_size):
        hashed.append(len(sequence.tokens))
        hash_tokens(sequence, block_size)

    monkeypatch.setattr(Sequence, "hash_tokens", counted)
    subject = engine()
    reservations = ReservationQueue(subject, lambda request: None)
    taken = subject.pool.allocate(subject.pool.num_free - 2)
    asking = asyncio.ensure_future(reservations.ask(request("a", tuple(range(1, 41))), 5.0))
    for _ in range(20):
        reservations.grant()
        await asyncio.sleep(0)
    assert not asking.done()
    subject.pool.free(taken)
    reservations.grant()
    assert (await asking).num_blocks == 10 and hashed == [40]


def test_an_error_at_admission_leaves_nothing_behind() -> None:
    subject = engine()
    for prompt in (("x",), (None,), (2**70,)):
        with pytest.raises((TypeError, InvalidRequest)):
            subject.add(request("a", prompt), 0.0, hold=False)  # type: ignore[arg-type]
        subject.check()
    assert not subject.has_work
    subject.add(request("a", (1, 2)), 0.0, hold=False)
    assert tokens_of(run_to_end(subject), "a/0") == expected("a/0", 2)
