"""A timer fires once, at the latest time it was started for, whatever timer of the loop it still has."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.offline.sim import clock
from workers.engine.timer import Timer

ACTS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.one_of(st.none(), st.floats(0.0, 5.0)), st.booleans()), min_size=1, max_size=12
)


@settings(deadline=None)
@given(ACTS)
def test_it_fires_as_a_new_timer_of_the_loop_would(acts: list[tuple[float, float | None, bool]]) -> None:
    """Each act: wait, then start for some seconds, or stop (None) with `close` or `stop`."""

    async def story() -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        plain: list[float] = []
        subject = Timer(lambda: fired.append(loop.time()))
        timer: Any = None
        for wait_s, seconds, close in acts:
            await asyncio.sleep(wait_s)
            if timer is not None:
                timer.cancel()
            if seconds is not None:
                subject.start(seconds)
                timer = loop.call_later(seconds, lambda: plain.append(loop.time()))
            elif close:
                subject.close()
            else:
                subject.stop()
        await asyncio.sleep(10.0)
        return fired, plain

    fired, plain = clock.run(story())
    assert fired == pytest.approx(plain)


def test_a_closed_timer_leaves_no_timer() -> None:
    async def story() -> float:
        subject = Timer(lambda: None)
        subject.start(100.0)
        subject.close()
        await asyncio.get_running_loop().create_future()
        return 0.0

    with pytest.raises(clock.Deadlock):
        clock.run(story())
