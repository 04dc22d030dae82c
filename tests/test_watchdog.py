"""A watchdog counts the time in which the loop ran: silence is told in time, and our own absence is not silence."""

import asyncio
import time
from typing import Any

import pytest

from cluster.offline.sim import clock
from diptych.watchdog import TICKS, Watchdog, patient_timeout


def block(seconds: float) -> None:
    """Hold the loop up, as a long computation does."""
    time.sleep(seconds)


@pytest.mark.parametrize("shares_ticks", [False, True])
def test_silence_is_told_after_its_time_and_at_most_one_tick_more(shares_ticks: bool) -> None:
    async def story() -> list[float]:
        loop, rung = asyncio.get_running_loop(), list[float]()
        await asyncio.sleep(0.1)
        watchdog = Watchdog(2.0, lambda: rung.append(loop.time()), shares_ticks=shares_ticks)
        for _ in range(50):
            await asyncio.sleep(0.33)
            watchdog.reset()
        heard_s = loop.time()
        await asyncio.sleep(10.0)
        return [each - heard_s for each in rung]

    (silent_s,) = clock.run(story())
    assert 2.0 <= silent_s <= 2.0 + 2.0 / TICKS


def test_without_a_word_it_takes_exactly_its_time() -> None:
    async def story() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with patient_timeout(4.0):
                await loop.create_future()
        return loop.time()

    assert clock.run(story()) == pytest.approx(4.0)


async def test_what_arrived_while_the_loop_was_blocked_counts() -> None:
    """A peer in a thread answers at once; the loop is blocked for several times the timeout before it can read that."""
    loop = asyncio.get_running_loop()
    async with patient_timeout(0.3):
        for _ in range(2):
            answered = loop.run_in_executor(None, lambda: "here")
            block(0.5)
            assert await answered == "here"
    with pytest.raises(TimeoutError):
        async with patient_timeout(0.3):
            block(0.5)
            await loop.create_future()


def test_heard_gives_a_timeout_all_its_time_again() -> None:
    async def story() -> None:
        async with patient_timeout(1.0) as silence:
            for _ in range(10):
                await asyncio.sleep(0.9)
                silence.reset()

    clock.run(story())


def test_watchdogs_that_share_ticks_expire_together_and_none_too_early() -> None:
    async def story() -> tuple[list[float], list[float]]:
        time_now, begun, rung = asyncio.get_running_loop().time, list[float](), list[float]()
        for _ in range(9):
            begun.append(time_now())
            Watchdog(2.0, lambda: rung.append(time_now()), shares_ticks=True)
            await asyncio.sleep(0.02)
        await asyncio.sleep(3.0)
        return begun, rung

    begun, rung = clock.run(story())
    assert len(rung) == 9 and len(set(rung)) == 1
    assert begun[-1] + 2.0 <= rung[0] <= begun[0] + 2.0 + 2.0 / TICKS


def test_a_closed_watchdog_leaves_no_timer() -> None:
    async def story() -> None:
        Watchdog(100.0, lambda: None).close()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(clock.Deadlock):
        clock.run(story())


def test_watchdogs_that_share_ticks_have_one_timer_and_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        call_at, armed = loop.call_at, list[float]()

        def counting(when: float, *call: Any, context: Any = None) -> asyncio.TimerHandle:
            armed.append(when)
            return call_at(when, *call, context=context)

        monkeypatch.setattr(loop, "call_at", counting)
        watchdogs = [Watchdog(8.0, lambda: None, shares_ticks=True) for _ in range(100)]
        await asyncio.sleep(4.5)
        assert sorted(armed) == [1.0, 2.0, 3.0, 4.0, 4.5, 5.0]
        for each in watchdogs:
            each.close()
        await loop.create_future()

    with pytest.raises(clock.Deadlock):
        clock.run(story())
