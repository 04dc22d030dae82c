"""A worker that lives but could not open is asked again after a pause, and then serves."""

import asyncio
from collections import Counter

import pytest
from local import FAST, cluster, completed, request, split_spec

import cluster.pool as cluster_pool
from cluster.runtime.interface import WorkerOrder
from kvtransfer.layout import KVLayout
from kvtransfer.open import SharedMemory
from workers.build import build_worker
from workers.config import WorkerConfig
from workers.engine.executor import Executor
from workers.errors import RankLost
from workers.executor.modelled import modelled_facts, open_modelled
from workers.worker import Worker


async def test_a_worker_whose_ranks_did_not_come_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_pool, "START_AGAIN_S", 0.2)
    shared, opened = SharedMemory(), Counter[str]()
    facts = modelled_facts(layout=KVLayout("modelled", 30, 3, 64, 16))

    async def open_it(config: WorkerConfig, incarnation: str) -> Executor:
        opened[config.name] += 1
        if config.pool == "decode" and opened[config.name] < 3:
            raise RankLost("rank 1 ended")
        return open_modelled(config, facts, FAST, incarnation, shared)

    def build(order: WorkerOrder) -> Worker:
        config = build_worker(order.config).config  # with a host of its own
        return Worker(config, open_it, heartbeat_s=order.heartbeat_s)

    async with asyncio.timeout(20), cluster(split_spec(), build=build) as subject:
        events = await subject.run(request("a"))
        assert completed(events).transfers
        await subject.settle()
    assert opened == {"prefill-0": 1, "decode-0": 3}
