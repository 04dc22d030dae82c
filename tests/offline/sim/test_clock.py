"""The virtual loop keeps asyncio's contract, jumps in time, and names the waiting tasks in a deadlock."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.offline.sim.clock import Deadlock, run


def test_an_hour_passes_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    begun = time.process_time()
    assert run(main()) == 3600.0
    assert time.process_time() - begun < 60.0


@given(st.lists(st.integers(0, 20), max_size=30))
def test_timers_run_by_time_and_equal_ones_in_the_order_they_were_set(delays: list[int]) -> None:
    async def main() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, int]] = []
        for number, delay in enumerate(delays):
            loop.call_later(delay / 10, lambda number: seen.append((loop.time(), number)), number)
        await asyncio.sleep(3.0)
        return seen

    expected = sorted((delay / 10, number) for number, delay in enumerate(delays))
    assert run(main()) == expected


def test_a_cancelled_timer_neither_runs_nor_holds_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for handle in [loop.call_later(1000.0 + index, pytest.fail, "it ran") for index in range(1000)]:
            handle.cancel()
        await asyncio.sleep(0.5)
        return loop.time()

    assert run(main()) == 0.5


def test_a_timeout_expires_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 2.5


def test_a_lost_wake_up_is_a_deadlock_that_names_the_waiter() -> None:
    async def forgotten(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        await asyncio.sleep(1.0)
        waiting = asyncio.create_task(forgotten(asyncio.Event()), name="the reader")
        await waiting

    with pytest.raises(Deadlock, match=r"at 1\.000000 s.*the reader in .*forgotten \(sim/test_clock\.py:\d+\)"):
        run(main())


def test_streams_carry_frames_both_ways_and_end() -> None:
    async def main() -> tuple[bytes, bytes, bytes]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readexactly(5)).upper())
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"he")
        writer.write(b"llo")
        got = await reader.read()
        writer.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
        return got, await reader.read(), b""

    assert run(main()) == (b"HELLO", b"", b"")


def test_a_port_has_one_listener() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 5000)
        with pytest.raises(OSError, match="in use"):
            await asyncio.start_server(lambda *_: None, "127.0.0.1", 5000)
        server.close()

    run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="no threads"):
        run(main())


def test_what_main_raises_comes_out_and_its_tasks_are_ended() -> None:
    ended: list[str] = []

    async def beside() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("beside")

    async def main() -> None:
        task = asyncio.create_task(beside())
        await asyncio.sleep(1.0)
        assert not task.done()
        raise ValueError("main's")

    with pytest.raises(ValueError, match="main's"):
        run(main())
    assert ended == ["beside"]
