"""KV is not read, and its blocks are not overwritten, before the device has finished."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import workers.executor.rank as rank_module
from benchmarks.outputs_reader import OutputsReader
from diptych.clock import now_s
from kvtransfer.open import SharedMemory
from kvtransfer.transport import PullOrder
from tests.model.test_executor import BLOCKS, PROMPT, config, open_tiny, prompt_plan
from workers.config import WorkerConfig
from workers.engine.step import StepResult
from workers.executor.rank import Rank
from workers.executor.rank_loader import open_solo
from workers.model.folder import ModelFolder
from workers.ops.completion import record_event_on, side_stream_on
from workers.request import Request, SamplingParams
from workers.server import WorkerServer

DEADLINE_S = 8.0


class Pending:
    """A device event that is pending until the test completes it."""

    def __init__(self, device: "SlowDevice") -> None:
        self._device = device
        self._passed = threading.Event()

    def synchronize(self) -> None:
        self._device.waited_for.put(self)
        assert self._passed.wait(DEADLINE_S), "the test did not let the device pass this event"

    def finish(self) -> None:
        self._passed.set()


class SlowDevice:
    """A fake GPU queue: every mark on it is an event that stays pending until the test completes it."""

    def __init__(self) -> None:
        self.waited_for: queue.Queue[Pending] = queue.Queue()

    def record_event(self) -> Pending:
        return Pending(self)

    def under(self, executor: Rank) -> Rank:
        executor._pool = replace(executor._pool, record_event=self.record_event)
        return executor

    async def next_wait(self) -> Pending:
        """The event that the compute thread waits for now."""
        return await asyncio.to_thread(self.waited_for.get, timeout=DEADLINE_S)


async def settle_down() -> None:
    """Let the event loop run everything that is ready."""
    for _ in range(20):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("digest", [False, True], ids=["digests off", "digests on"])
async def test_no_block_is_ready_before_the_device_has_written_it(tiny: ModelFolder, digest: bool) -> None:
    device = SlowDevice()
    setting = config(max_batch_tokens=8, max_running=8)
    setting = replace(setting, transfer=replace(setting.transfer, digest=digest, host="127.0.0.1"), secret="s")

    async def open_slow(given: WorkerConfig, incarnation: str) -> Rank:
        return device.under(await open_solo(given, tiny, incarnation, SharedMemory()))

    worker = await WorkerServer(setting, open_slow).open()
    reader = await OutputsReader.open(worker, "gateway")
    await worker.prefill(Request("a", PROMPT, SamplingParams(temperature=0, seed=0), reply_to="gateway"))
    for chunk in range(3):
        written = await device.next_wait()
        await settle_down()
        leases = worker.engine.leases
        [lease] = leases._leases.values()
        assert leases.progress(lease.key, lease.epoch, 0, now_s()).ready_blocks == chunk
        written.finish()
        async with asyncio.timeout(DEADLINE_S):
            while leases.progress(lease.key, lease.epoch, 0, now_s()).ready_blocks == chunk:
                await asyncio.sleep(0.001)
    await reader.close()
    await worker.close()


async def test_a_step_is_not_over_before_its_event(tiny: ModelFolder) -> None:
    device = SlowDevice()
    executor = device.under(await open_tiny(tiny))
    step = asyncio.ensure_future(executor.execute(prompt_plan()))
    written = await device.next_wait()
    await settle_down()
    assert not step.done(), "its blocks could be freed and written by a transfer"
    written.finish()
    assert (await step).seconds > 0
    await executor.close()


async def test_blocks_of_a_failed_read_are_not_free_before_they_are_zero(tiny: ModelFolder) -> None:
    device = SlowDevice()
    executor = device.under(await open_tiny(tiny))
    read = executor.pull(PullOrder("nobody", BLOCKS, BLOCKS, 0, len(PROMPT), (), 5.0))
    zeroed = await device.next_wait()
    await settle_down()
    assert read.done.exception() is not None
    assert not read.settled.done(), "the next transfer into them could come before the zeros"
    zeroed.finish()
    await asyncio.wait_for(read.settled, DEADLINE_S)
    await executor.close()


def test_a_cpu_has_nothing_to_wait_for() -> None:
    assert record_event_on(torch.device("cpu"))() is None


def test_a_gpus_mark_is_an_event_on_the_stream_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            calls.append(("made", blocking))

        def record(self, stream: object) -> None:
            calls.append(("recorded on", stream))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    assert isinstance(record_event_on(torch.device("cuda", 1))(), Event)
    assert calls == [("made", True), ("recorded on", "the stream of cuda:1")]


def test_work_beside_the_steps_is_done_when_it_ends_also_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    current = ["compute"]

    class Event:
        def __init__(self, blocking: bool) -> None: ...

        def record(self, stream: str) -> None:
            calls.append(f"mark on {stream}")

        def synchronize(self) -> None:
            calls.append("wait")

    @contextlib.contextmanager
    def inside(stream: str) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "its own")
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    side_stream = side_stream_on(torch.device("cuda", 0))
    with side_stream():
        assert current[-1] == "its own" and not calls
    assert calls == ["mark on its own", "wait"]
    with pytest.raises(ValueError, match="half of it"), side_stream():
        raise ValueError("half of it is in the device's queue")
    assert calls == ["mark on its own", "wait"] * 2


async def test_heartbeats_go_out_while_a_step_computes(tiny: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step belongs to the compute thread, so a long one does not look like silence."""
    computing, go_on, compute = threading.Event(), threading.Event(), rank_module.compute

    def slow(*args: Any) -> StepResult:
        computing.set()
        assert go_on.wait(DEADLINE_S)
        return compute(*args)

    setting = config()
    setting = replace(setting, transfer=replace(setting.transfer, host="127.0.0.1"), secret="s")

    async def open_executor(given: WorkerConfig, incarnation: str) -> Rank:
        return await open_solo(given, tiny, incarnation, SharedMemory())

    worker = await WorkerServer(setting, open_executor, heartbeat_s=0.01).open()
    monkeypatch.setattr(rank_module, "compute", slow)
    reader = await OutputsReader.open(worker, "gateway")
    await worker.generate(Request("a", PROMPT, SamplingParams(temperature=0, seed=0, max_tokens=1), reply_to="gateway"))
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.to_thread(computing.wait, DEADLINE_S)
        for _ in range(10):
            assert (await reader.next()).outputs == ()
        go_on.set()
        while not (outputs := (await reader.next()).outputs):
            continue
    assert [each.key for each in outputs] == ["a/0"]
    await reader.close()
    await worker.close()
