"""The leader's program: `python -m benchmarks.gang.leader TRANSPORT`. Starts a rank and reads one task per line.

steps PLAN NUMBER SECONDS    round trips of that plan: NUMBER, or as many as fit into SECONDS
idle SECONDS                 CPU share while the rank has no plan
kill                         kills the rank while it holds a plan; the last task
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from benchmarks.engine.drivers.protocol import MARK, READY
from benchmarks.gang.plans import PLANS, decode_result, encode
from benchmarks.gang.transports import Delivery, module

WARM_UP_STEPS = 10
IN_FLIGHT_S = 0.05  # a plan reaches a stopped rank within this time


def main() -> None:
    asyncio.run(_main(sys.argv[1]))


async def _main(transport: str) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(address: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-m", "benchmarks.gang.rank", transport, address]))
        return started[-1].pid

    delivery: Delivery = await module(transport).lead(start)
    try:
        _print(READY)
        for line in sys.stdin:
            _print(MARK + json.dumps(await _answer(delivery, json.loads(line))))
    finally:
        delivery.close()
        for process in started:
            process.kill()
            process.wait()


async def _answer(delivery: Delivery, task: list[str | float]) -> Mapping[str, object]:
    match task:
        case ["steps", str(plan), int(number), float(seconds)]:
            return await steps(delivery, plan, number, seconds)
        case ["idle", float(seconds)]:
            begun_s, cpu_s = time.perf_counter(), _cpu_s(delivery.pid)
            await asyncio.sleep(seconds)
            return {"share": (_cpu_s(delivery.pid) - cpu_s) / (time.perf_counter() - begun_s)}
        case ["kill"]:
            return await killed(delivery)
    raise ValueError(f"unknown task {task}")


async def steps(delivery: Delivery, plan_name: str, number: int, seconds: float) -> Mapping[str, object]:
    """Seconds of each round trip, from plan to result on this event loop, and CPU seconds per step."""
    plan = PLANS[plan_name]
    for _ in range(WARM_UP_STEPS):
        await delivery.deliver(encode(plan))
    taken_s: list[float] = []
    cpu_s, deadline_s = _cpu_s(delivery.pid), time.perf_counter() + seconds
    while len(taken_s) < number and time.perf_counter() < deadline_s:
        begun_s = time.perf_counter()
        result = decode_result(await delivery.deliver(encode(plan)))
        taken_s.append(time.perf_counter() - begun_s)
        assert len(result.tokens) == len(plan.chunks)
    return {"taken_s": taken_s, "cpu_s": (_cpu_s(delivery.pid) - cpu_s) / len(taken_s)}


async def killed(delivery: Delivery) -> Mapping[str, object]:
    """Seconds from SIGKILL until the leader's call fails, and its error. The rank is stopped with the plan."""
    os.kill(delivery.pid, signal.SIGSTOP)
    call = asyncio.ensure_future(delivery.deliver(encode(PLANS["decode of 1"])))
    await asyncio.sleep(IN_FLIGHT_S)
    os.kill(delivery.pid, signal.SIGKILL)
    begun_s = time.perf_counter()
    await asyncio.wait([call])
    error = call.exception()
    assert error is not None, "a killed rank answered"
    return {"after_s": time.perf_counter() - begun_s, "error": type(error).__name__}


def _cpu_s(rank_pid: int) -> float:
    """CPU seconds of this process and the rank, to the nanosecond, from the processes' CPU clocks."""
    return time.process_time() + time.clock_gettime((~rank_pid << 3) | 2)


def _print(line: str) -> None:
    print(f"\n{line}", flush=True)


if __name__ == "__main__":
    main()
