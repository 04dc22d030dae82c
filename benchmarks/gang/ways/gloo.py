"""`torch.distributed` over gloo: the plan's size, then its bytes, broadcast; the answer sent back in one message.

Its calls block, so the leader waits on a thread beside its event loop; the rank's compute thread waits itself.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from benchmarks.gang.ways import DEADLINE_S, IDLE_S, Compute, Start

dist: Any = torch.distributed  # these parts of it have no types
ANSWER_BYTES = 4096  # always as many, so that no size goes before it


class Gloo:
    def __init__(self, pid: int, group: Any, store: Any) -> None:
        self.pid = pid
        self._group = group
        self._store = store  # lives as long as the group
        self._thread = ThreadPoolExecutor(1)

    async def deliver(self, plan: bytes) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._deliver, plan)

    def _deliver(self, plan: bytes) -> bytes:
        _broadcast(self._group, torch.tensor([len(plan)]))
        _broadcast(self._group, torch.frombuffer(bytearray(plan), dtype=torch.uint8))
        answer = torch.empty(ANSWER_BYTES, dtype=torch.uint8)
        self._group.recv([answer], 1, 0).wait()
        data = answer.numpy().tobytes()
        return data[4 : 4 + int.from_bytes(data[:4], "little")]

    def close(self) -> None:
        self._thread.shutdown(wait=False)


async def lead(way: str, start: Start) -> Gloo:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pid = start(str(store.port))
    return Gloo(pid, _group(store, 0), store)


def serve(way: str, address: str, compute: Compute) -> None:
    torch.set_num_threads(1)
    group = _group(dist.TCPStore("127.0.0.1", int(address)), 1)
    while True:
        size = torch.zeros(1, dtype=torch.int64)
        _broadcast(group, size)
        plan = torch.empty(int(size), dtype=torch.uint8)
        _broadcast(group, plan)
        data = compute(plan.numpy().tobytes())
        answer = bytearray(ANSWER_BYTES)
        answer[: 4 + len(data)] = len(data).to_bytes(4, "little") + data
        group.send([torch.frombuffer(answer, dtype=torch.uint8)], 0, 0).wait()


def _group(store: Any, rank: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=IDLE_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    group.broadcast(tensor, root=0).wait()
