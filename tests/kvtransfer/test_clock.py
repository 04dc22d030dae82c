"""Durations on an event loop whose `time()` has whole milliseconds and stands still within an iteration, as uvloop."""

import asyncio
import time

import pytest

from cluster.observe.ledger import now_ns
from cluster.offline.sim.clock import VirtualLoop
from diptych.clock import now_s
from kvtransfer.open import SharedMemory
from kvtransfer.ticket import LinkReport
from tests.kvtransfer.peers import address_of, make_region, open_set


class CoarseLoop(asyncio.SelectorEventLoop):
    _read_s = 0.0

    def time(self) -> float:
        return self._read_s

    def _run_once(self) -> None:
        self._read_s = int(1e3 * time.monotonic()) / 1e3
        super()._run_once()  # type: ignore[misc]


@pytest.mark.parametrize("backend", ["memory", "tcp"])
def test_a_link_is_measured(backend: str) -> None:
    async def connected() -> LinkReport:
        shared = SharedMemory()
        owner = open_set(make_region(filled=True), (backend,), "owner", shared=shared)
        reader = open_set(make_region(), (backend,), "reader", shared=shared)
        try:
            return await reader.connect(address_of(owner, "owner"))
        finally:
            await reader.close()
            await owner.close()

    with asyncio.Runner(loop_factory=CoarseLoop) as runner:
        report = runner.run(connected())
    assert 1e-6 < report.latency_s < 1.0
    assert 1e3 < report.bytes_per_s < 1e12


def test_time_passes_within_a_callback() -> None:
    async def measured() -> tuple[float, float, float]:
        loop_s, begun_ns, begun_s = asyncio.get_running_loop().time(), now_ns(), now_s()
        while now_s() < begun_s + 0.002:
            """Computes something."""
        return asyncio.get_running_loop().time() - loop_s, now_s() - begun_s, (now_ns() - begun_ns) / 1e9

    with asyncio.Runner(loop_factory=CoarseLoop) as runner:
        of_loop, ours, of_ledgers = runner.run(measured())
    assert of_loop == 0.0 and ours >= 0.002 and of_ledgers >= 0.002


def test_the_time_of_a_loop_with_its_own_clock_counts() -> None:
    async def slept() -> tuple[float, float]:
        begun_s = now_s()
        await asyncio.sleep(3600.0)
        return begun_s, now_s()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(slept()) == (0.0, 3600.0)
