"""CPU and memory of the controller and of eight gateways, with 512 and 1,000 simulated workers.

    workers, in a few processes  <── controller (one process) ──>  8 gateways (a process each)

Controller, membership, preflight, discovery, clients and router are production code, and so are all connections to
workers. Ray is not measured: calls to the controller are pickled frames. Workers send heartbeats every `HEARTBEAT_S`,
which are most of the idle CPU. Decisions are timed by their CPU too, so that no other process counts.
"""

import asyncio
import pickle
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.control_plane.calls import RemoteService
from benchmarks.figures import BenchmarkClaim, BenchmarkPart, Figure, Progress, spread
from benchmarks.pinning import process_cpu_s
from cluster.offline.load.processes import Child, ProcessFailed
from cluster.spec import ClusterSpec, GatewaySpec, HealthSpec, PoolSpec, Role
from workers.config import EngineConfig, TransferConfig
from workers.costs import LinearCost

SIZES, QUICK_SIZES = (512, 1000), (24,)
GATEWAYS, QUICK_GATEWAYS = 8, 2
WORKER_HOSTS = 4
HEARTBEAT_S, DEAD_AFTER_S = 5.0, 60.0  # two cores carry all workers
JOIN_TIMEOUT_S, SETTLE_S, IDLE_S, FLIPS, FLIP_S = 900.0, 10.0, 20.0, 40, 0.25
DECISIONS, FRESH = 1000, 0.1
ROUNDS = 1
JOIN_CPU_S, FLIP_CPU_S, IDLE_SHARE, GATEWAY_BYTES, DECISION_S = 10.0, 0.010, 0.02, 300 << 20, 500e-6
COST = LinearCost(0.005, 0.00005, 0.0, 0.0005, 0.0, 0.002, 1e-10)


@dataclass(slots=True)
class ControlSample:
    """One cluster. CPU seconds and shares of a core; per gateway where there are several values."""

    workers: int
    join_wall_s: float = 0.0
    join_cpu_s: float = 0.0
    join_gateway_cpu_s: list[float] = field(default_factory=list)
    idle_controller: float = 0.0
    idle_gateways: list[float] = field(default_factory=list)
    flip_controller_s: float = 0.0
    flip_gateways_s: list[float] = field(default_factory=list)
    controller_bytes: int = 0
    gateway_bytes: list[int] = field(default_factory=list)
    pictures_s: list[float] = field(default_factory=list)
    decisions_s: list[float] = field(default_factory=list)


def spec_of(workers: int) -> ClusterSpec:
    """Half of the workers prefill, half decode."""
    engine = EngineConfig(kv_blocks=256, max_batch_tokens=512, max_running=16, threads=1)
    roles = Role.PREFILL, Role.DECODE
    pools = tuple(PoolSpec(role.value, role, workers // 2, engine=engine, cost=COST) for role in roles)
    return ClusterSpec(
        "simulated",
        pools,
        transfer=TransferConfig(backends=("simulated",), digest=False, host="127.0.0.1", max_readers=workers),
        gateway=GatewaySpec(routing="slo"),
        health=HealthSpec(heartbeat_s=HEARTBEAT_S, dead_after_s=DEAD_AFTER_S, start_timeout_s=JOIN_TIMEOUT_S),
        executor="simulated",
    )


def measure(rounds: int, quick: bool, progress: Progress) -> BenchmarkPart:
    """Raises `ProcessFailed`."""
    sizes, gateways = (QUICK_SIZES, QUICK_GATEWAYS) if quick else (SIZES, GATEWAYS)
    samples = [sample(size, gateways, quick, progress) for _ in range(rounds) for size in sizes]
    return BenchmarkPart("control_plane", tuple(figures(samples)), tuple(claims(samples)), (NOTE,))


NOTE = f"{GATEWAYS} gateways, heartbeats every {HEARTBEAT_S:g} s, router slo, {FRESH:.0%} of the statistics fresh."


def sample(workers: int, gateways: int, quick: bool, progress: Progress) -> ControlSample:
    """Start a cluster in processes of its own, and measure it."""
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="diptych-bench-"))
        spec_file = Path(folder) / "spec.pickle"
        spec_file.write_bytes(pickle.dumps(spec_of(workers)))
        hosts = [_started(undo, "workers") for _ in range(WORKER_HOSTS)]
        controller = _started(undo, "controller", str(spec_file), *(str(port) for _, port in hosts))
        names = [f"gateway-{index}" for index in range(gateways)]
        joined = [_started(undo, "gateway", name, str(controller[1])) for name in names]
        return asyncio.run(_Run(workers, controller, joined, quick, progress).measure())


def _started(undo: ExitStack, *args: str) -> tuple[int, int]:
    """Start a measured process; returns its process id and port."""
    child = undo.enter_context(Child([sys.executable, "-m", "benchmarks.control_plane.measured_process", *args]))
    return child.pid, int(child.wait_line("its port is ", 60.0).text.split()[-1])


class _Run:
    """The measurement of one cluster. `controller` and `gateways`: process id and port."""

    def __init__(
        self,
        workers: int,
        controller: tuple[int, int],
        gateways: Sequence[tuple[int, int]],
        quick: bool,
        progress: Progress,
    ) -> None:
        self._found = ControlSample(workers)
        self._pids = [controller[0], *(pid for pid, _ in gateways)]
        self._controller = RemoteService(controller[1])
        self._gateways = [RemoteService(port) for _, port in gateways]
        self._shorter = 10 if quick else 1
        self._progress = progress

    async def measure(self) -> ControlSample:
        found = self._found
        await self._join()
        self._progress(f"{found.workers} workers joined in {found.join_wall_s:.0f} s, {found.join_cpu_s:.1f} s of CPU")
        await asyncio.sleep(SETTLE_S / self._shorter)
        idle_s = IDLE_S / self._shorter
        idle = [used / idle_s for used in await self._used(asyncio.sleep(idle_s))]
        found.idle_controller, found.idle_gateways = idle[0], idle[1:]
        await self._flips(idle)
        for gateway in self._gateways[:1]:
            call = gateway.call("decide", DECISIONS // self._shorter, FRESH, timeout_s=JOIN_TIMEOUT_S)
            found.pictures_s, found.decisions_s = await call
        memory = [psutil.Process(pid).memory_info().rss for pid in self._pids]
        found.controller_bytes, found.gateway_bytes = memory[0], memory[1:]
        for service in (self._controller, *self._gateways):
            await service.close()
        return found

    async def _join(self) -> None:
        """Until every gateway sees every worker."""

        async def joined() -> None:
            await self._controller.call("start")
            deadline_s = time.monotonic() + JOIN_TIMEOUT_S
            while await self._controller.call("ready", 5.0) is None:
                pass
            while min(await asyncio.gather(*(each.call("ready") for each in self._gateways))) < self._found.workers:
                if time.monotonic() > deadline_s:
                    raise ProcessFailed(f"the gateways do not see {self._found.workers} workers")
                await asyncio.sleep(0.5)

        begun_s = time.perf_counter()
        used = await self._used(joined())
        self._found.join_wall_s = time.perf_counter() - begun_s
        self._found.join_cpu_s, self._found.join_gateway_cpu_s = used[0], used[1:]

    async def _flips(self, idle: Sequence[float]) -> None:
        """Change the role of decode workers and back, one after another. Idle CPU is not counted."""
        flips = FLIPS // self._shorter

        async def flip_all() -> None:
            for number in range(flips):
                role = Role.DECODE if number % 2 else Role.PREFILL
                await self._controller.call("flip", f"decode-{number // 2}", role)
                await asyncio.sleep(FLIP_S)

        begun_s = time.perf_counter()
        used = await self._used(flip_all())
        wall_s = time.perf_counter() - begun_s
        each = [(cpu_s - share * wall_s) / flips for cpu_s, share in zip(used, idle, strict=True)]
        self._found.flip_controller_s, self._found.flip_gateways_s = each[0], each[1:]

    async def _used(self, work: Awaitable[None]) -> list[float]:
        """CPU seconds of controller and gateways meanwhile."""
        before = [process_cpu_s(pid) for pid in self._pids]
        await work
        return [process_cpu_s(pid) - was for pid, was in zip(self._pids, before, strict=True)]


def p99(samples: Sequence[float]) -> float:
    return sorted(samples)[int(0.99 * (len(samples) - 1))]


def readings(found: ControlSample) -> Iterable[tuple[str, str, Sequence[float]]]:
    """Column, unit and values."""
    yield "Join, wall", "s", [found.join_wall_s]
    yield "Join, controller", "s", [found.join_cpu_s]
    yield "Join, a gateway", "s", found.join_gateway_cpu_s
    yield "Idle controller", "%", [found.idle_controller]
    yield "Idle gateway", "%", found.idle_gateways
    yield "Flip, controller", "ms", [found.flip_controller_s]
    yield "Flip, a gateway", "ms", found.flip_gateways_s
    yield "Controller", "MiB", [found.controller_bytes]
    yield "A gateway", "MiB", found.gateway_bytes
    yield "Picture p50", "us", [sorted(found.pictures_s)[len(found.pictures_s) // 2]]
    yield "Decision p50", "us", [sorted(found.decisions_s)[len(found.decisions_s) // 2]]
    yield "Decision p99", "us", [p99(found.decisions_s)]


def figures(samples: Sequence[ControlSample]) -> Iterable[Figure]:
    """A row for each size; values of gateways and rounds together."""
    by_size: dict[int, list[ControlSample]] = {}
    for found in samples:
        by_size.setdefault(found.workers, []).append(found)
    for workers, group in by_size.items():
        for column, unit, _ in readings(group[0]):
            values = [value for found in group for name, _, each in readings(found) if name == column for value in each]
            yield Figure("Control plane", f"{workers} workers", column, unit, spread(values))


def claims(samples: Sequence[ControlSample]) -> Iterable[BenchmarkClaim]:
    """The worst of all rounds, for the largest cluster."""
    largest = max(found.workers for found in samples)
    worst = [found for found in samples if found.workers == largest]
    of = f"{largest} workers"
    yield BenchmarkClaim(f"controller CPU, {of} join", max(each.join_cpu_s for each in worst), JOIN_CPU_S, "s")
    yield BenchmarkClaim(
        f"CPU of a flip at a gateway, {of}", max(max(each.flip_gateways_s) for each in worst), FLIP_CPU_S, "ms"
    )
    yield BenchmarkClaim(f"idle controller, {of}", max(each.idle_controller for each in worst), IDLE_SHARE, "%")
    yield BenchmarkClaim(f"idle gateway, {of}", max(max(each.idle_gateways) for each in worst), IDLE_SHARE, "%")
    memory = max(max(each.gateway_bytes) for each in worst)
    yield BenchmarkClaim(f"memory of a gateway, {of}", memory, GATEWAY_BYTES, "MiB")
    yield BenchmarkClaim(f"decision p99, {of}", max(p99(each.decisions_s) for each in worst), DECISION_S, "us")
