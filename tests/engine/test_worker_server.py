"""A server gives access to its worker once it has loaded, to callers of this incarnation, until it is closed."""

import pytest

from kvtransfer.open import SharedMemory
from workers.build import build_worker
from workers.config import TransferConfig, WorkerConfig
from workers.engine.executor import Executor
from workers.errors import RankLost, WorkerClosed
from workers.server import WorkerServer


def server() -> WorkerServer:
    transfer = TransferConfig(backends=("memory",))
    config = WorkerConfig("a", "pool", "simulated", transfer=transfer, executor="simulated", secret="of the test")
    return build_worker(config, shared=SharedMemory())


async def test_a_worker_is_unavailable_until_it_has_loaded() -> None:
    subject = server()
    with pytest.raises(WorkerClosed, match="still loading"):
        subject.worker()
    worker = await subject.open()
    assert subject.worker() is worker is await subject.open()
    await subject.close()


async def test_a_call_to_an_earlier_incarnation_is_refused() -> None:
    subject = server()
    worker = await subject.open()
    assert subject.worker(subject.incarnation) is worker
    with pytest.raises(WorkerClosed, match="earlier is gone"):
        subject.worker("earlier")
    await subject.close()


async def test_a_load_that_failed_is_tried_again() -> None:
    whole, loads = server(), []

    async def open_executor(config: WorkerConfig, incarnation: str) -> Executor:
        loads.append(incarnation)
        if len(loads) == 1:
            raise RankLost("rank 1 ended")
        return await whole._open_executor(config, incarnation)

    subject = WorkerServer(whole.config, open_executor)
    with pytest.raises(RankLost):
        await subject.open()
    assert (await (await subject.open()).info()).incarnation == subject.incarnation
    assert loads == [subject.incarnation] * 2
    await subject.close()


async def test_a_closed_server_opens_no_more_and_its_worker_takes_no_calls() -> None:
    subject = server()
    worker = await subject.open()
    await subject.close()
    with pytest.raises(WorkerClosed):
        await subject.open()
    with pytest.raises(WorkerClosed, match="is closing"):
        await worker.check()
