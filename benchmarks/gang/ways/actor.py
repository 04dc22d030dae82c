"""A call of an async Ray actor, with the plan's bytes as its argument, on a Ray of our own."""

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gang.plans import answer
from benchmarks.gang.ways import DEADLINE_S, Start
from cluster.runtime.auth import settle_auth

settle_auth()
import ray  # noqa: E402  (it reads who may talk to it as it is imported)


class _Rank:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def pid(self) -> int:
        return os.getpid()

    async def step(self, plan: bytes) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, answer, plan)


class Call:
    def __init__(self, pid: int, actor: Any) -> None:
        self.pid = pid
        self._actor = actor

    async def deliver(self, plan: bytes) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            data: bytes = await self._actor.step.remote(plan)
        return data

    def close(self) -> None:
        with contextlib.suppress(Exception):  # its own end must not hide what was measured
            ray.shutdown()


async def lead(way: str, start: Start) -> Call:
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=2,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
    )
    ranks: Any = ray.remote(_Rank)
    rank = ranks.remote()
    return Call(await rank.pid.remote(), rank)
