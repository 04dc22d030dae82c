"""An alarm rings once, at the latest time it was set to, whatever timer it still has."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sim import clock
from workers.alarm import Alarm

ACTS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.one_of(st.none(), st.floats(0.0, 5.0)), st.booleans()), min_size=1, max_size=12
)


@settings(deadline=None)
@given(ACTS)
def test_it_rings_as_a_timer_made_anew_each_time_would(acts: list[tuple[float, float | None, bool]]) -> None:
    """Each act: wait, then set to so many seconds, or call off (None), with `close` or `off`."""

    async def story() -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        rung: list[float] = []
        plain: list[float] = []
        alarm = Alarm(lambda: rung.append(loop.time()))
        timer: Any = None
        for wait_s, seconds, close in acts:
            await asyncio.sleep(wait_s)
            if timer is not None:
                timer.cancel()
            if seconds is not None:
                alarm.set(seconds)
                timer = loop.call_later(seconds, lambda: plain.append(loop.time()))
            elif close:
                alarm.close()
            else:
                alarm.off()
        await asyncio.sleep(10.0)
        return rung, plain

    rung, plain = clock.run(story())
    assert rung == pytest.approx(plain)


def test_a_closed_alarm_leaves_no_timer() -> None:
    async def story() -> float:
        alarm = Alarm(lambda: None)
        alarm.set(100.0)
        alarm.close()
        await asyncio.get_running_loop().create_future()
        return 0.0

    with pytest.raises(clock.Deadlock):
        clock.run(story())
