"""Run a workload on a simulated cluster: what each request saw and what each worker did, as a `Run`.

The same specification, models, workload and seed give the same run, to the bit.
"""

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.dispatch.dispatcher import Dispatcher
from cluster.events import ClusterError, Rejected
from cluster.offline.scoring.records import RequestOutcome, RequestRecord, Run
from cluster.offline.scoring.request_recorder import RequestRecorder
from cluster.offline.sim.clock import Deadlock, run
from cluster.offline.sim.cluster import (
    DEFAULT_ENVIRONMENT,
    Environment,
    PoolModel,
    SimCluster,
    open_cluster,
    request_id,
)
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.prompts import request
from cluster.spec import ClusterSpec, Role
from workers.request import SLO
from workers.stats import WorkerStats

STALLED_S = 3600.0  # virtual seconds without a token anywhere that mean a lost request
DUE = 1.0 + 1e-9  # a token at the very deadline is in time
GARBAGE = 1_000_000  # new objects between two looks for cycles
SETTLE_S = 60.0  # virtual seconds in which workers must release every block


class Leaked(RuntimeError):
    """Every request has ended, but a worker still holds blocks; the message says which."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`trace`: record every step. `until_s`: end the run this long after the first arrival.

    `max_missed`: end it as soon as more requests than this can no longer meet `slo`; `min_met`: as soon as this many
    have ended and met it. `roles`: by worker, at the first arrival; those of their pools otherwise.
    """

    seed: int = 0
    slo: SLO = field(default_factory=SLO)
    trace: bool = False
    until_s: float | None = None
    max_missed: int | None = None
    system: str = ""
    environment: Environment = DEFAULT_ENVIRONMENT
    min_met: int | None = None
    roles: Mapping[str, str] = field(default_factory=dict)


def simulate(
    spec: ClusterSpec, models: Mapping[str, PoolModel], workload: Workload, options: RunOptions | None = None
) -> Run:
    """Run the whole workload. `models` by pool name.

    Raises `Deadlock` when requests are stuck, `Leaked`, and what production raises for a cluster that cannot start.
    """
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE, *before[1:])  # nearly all that a simulation drops is in no cycle
    try:
        return run(_simulate(spec, models, workload, options or RunOptions()))
    finally:
        gc.set_threshold(*before)


async def _simulate(spec: ClusterSpec, models: Mapping[str, PoolModel], workload: Workload, options: RunOptions) -> Run:
    begun = time.perf_counter()
    async with open_cluster(spec, models, options.environment, trace=options.trace) as cluster:
        for worker, role in options.roles.items():
            await cluster.controller.call("flip", worker, Role(role))
        load = _Load(cluster, models, workload, options)
        await load.run()
        await _settle(cluster)
        return load.result(time.perf_counter() - begun)


class _Load:
    """Sends every request at its arrival time, whether or not earlier ones have ended."""

    def __init__(
        self, cluster: SimCluster, models: Mapping[str, PoolModel], workload: Workload, options: RunOptions
    ) -> None:
        self._cluster = cluster
        self._models = {pool.name: models[pool.name] for pool in cluster.spec.pools}
        self._workload = workload
        self._options = options
        self._vocab_size = min(model.vocab_size for model in self._models.values())
        self._begin_s = asyncio.get_running_loop().time() - workload.arrivals[0].at_s
        self.recorders = [
            RequestRecorder(index, arrival, self._now_s, self._begin_s)
            for index, arrival in enumerate(workload.arrivals)
        ]
        self._open: set[asyncio.Task[None]] = set()
        self._missed: set[int] = set()
        self._met = 0
        self._certain = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # by an unexpected error

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._begin_s

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(self._send())
        watching = asyncio.ensure_future(self._notice_stall())
        certain = asyncio.ensure_future(self._certain.wait())
        limit_s = self._options.until_s
        cut = None if limit_s is None else limit_s - (loop.time() - self._begin_s)
        try:
            ends: set[asyncio.Future[Any]] = {sending, watching, certain, self._broken}
            await asyncio.wait(ends, timeout=cut, return_when=asyncio.FIRST_COMPLETED)
            for done in (self._broken, watching, sending):
                if done.done():
                    done.result()
        finally:
            watching.cancel()
            sending.cancel()
            certain.cancel()
            for task in self._open:
                task.cancel()
            await asyncio.wait({sending, watching, certain, *self._open})

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        for recorder in self.recorders:
            await asyncio.sleep(self._begin_s + recorder.arrival.at_s - loop.time())
            task = asyncio.ensure_future(self._one(recorder))
            self._open.add(task)
            task.add_done_callback(self._ended)
            if self._options.max_missed is not None:
                self._judge_in_time(recorder, task)
        while self._open:
            await asyncio.wait(self._open)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _judge_in_time(self, recorder: RequestRecorder, task: "asyncio.Task[None]") -> None:
        """Judge a request when it ends, and when its first and last token are due."""
        slo, loop = self._options.slo, asyncio.get_running_loop()
        due = []
        if slo.ttft_s is not None:
            due.append(loop.call_later(slo.ttft_s * DUE, self._judge, recorder))
            if slo.tpot_s is not None:
                answer_s = slo.tpot_s * (recorder.arrival.output_tokens - 1)
                due.append(loop.call_later((slo.ttft_s + answer_s) * DUE, self._judge, recorder))

        def ended(_: object) -> None:
            for timer in due:
                timer.cancel()
            self._judge(recorder)
            self._met += recorder.can_meet(slo)
            if self._met == self._options.min_met:
                self._certain.set()

        task.add_done_callback(ended)

    def _judge(self, recorder: RequestRecorder) -> None:
        if recorder.can_meet(self._options.slo):
            return
        self._missed.add(recorder.index)
        assert self._options.max_missed is not None, "only judged when there is a limit"
        if len(self._missed) > self._options.max_missed:
            self._certain.set()

    async def _one(self, recorder: RequestRecorder) -> None:
        dispatchers = self._cluster.dispatchers
        dispatcher: Dispatcher = dispatchers[(recorder.index - recorder.arrival.sample) % len(dispatchers)]
        if self._options.environment.frontend_s:
            await asyncio.sleep(self._options.environment.frontend_s)
        try:
            options = self._options
            sent = request(self._workload, recorder.index, self._vocab_size, slo=options.slo, seed=options.seed)
            await dispatcher.run(sent, recorder.record)
        except Rejected as error:
            recorder.end(RequestOutcome.REJECTED, str(error))
        except ClusterError as error:
            recorder.end(RequestOutcome.FAILED, f"{type(error).__name__}: {error}")

    async def _notice_stall(self) -> None:
        seen = -1
        while True:
            await asyncio.sleep(STALLED_S)
            events = sum(recorder.events for recorder in self.recorders)
            waiting = [
                recorder
                for recorder in self.recorders
                if recorder.outcome is RequestOutcome.UNFINISHED and recorder.events
            ]
            if events == seen and waiting:
                names = ", ".join(f"{request_id(each.index)} ({each.where})" for each in waiting[:8])
                raise Deadlock(f"no token anywhere for {STALLED_S:.0f} s; {len(waiting)} requests wait: {names}")
            seen = events

    def result(self, wall_s: float) -> Run:
        served = tuple(recorder.served() for recorder in self.recorders)
        ends = [each.token_s[-1] for each in served if len(each.token_s)]
        spec, now_s = self._cluster.spec, asyncio.get_running_loop().time()
        meters = self._cluster.runtime.meters
        pools = {pool.name: pool for pool in spec.pools}
        for each in (meter for group in meters.values() for meter in group):
            each.settle(now_s)
        return Run(
            system=self._options.system or spec.name,
            workload=self._workload.name,
            clock="virtual",
            seed=self._options.seed,
            gpus=sum(pool.num_ranks for pool in spec.pools),
            seconds=max(ends, default=0.0) - served[0].arrival_s,
            wall_s=wall_s,
            served=served,
            workers=tuple(meter.record(pools[meter.pool]) for group in meters.values() for meter in group),
            steps=tuple(
                replace(step, begin_s=step.begin_s - self._begin_s, end_s=step.end_s - self._begin_s)
                for group in meters.values()
                for meter in group
                for step in meter.records
            ),
            model_flops=self._model_flops(served),
            peak_flops=sum(model.peak_flops * pools[name].replicas for name, model in self._models.items()),
            notes=self._workload.notes,
        )

    def _model_flops(self, served: Sequence[RequestRecord]) -> float:
        """Of all tokens that clients got. Tokens computed twice count once, by the definition of MFU."""
        shape = next(iter(self._models.values())).shape
        if shape is None:
            return 0.0
        total = 0.0
        for each in served:
            if count := len(each.token_s):
                total += shape.prefill_flops(each.prompt_tokens, each.cached_tokens)
                total += (count - 1) * shape.decode_flops(each.prompt_tokens + count // 2)
        return total


async def _settle(cluster: SimCluster) -> None:
    """Check that no worker holds a block once every request has ended."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + SETTLE_S
    workers = cluster.runtime.workers
    while busy := [name for name, worker in workers.items() if _holds_blocks(worker.engine.stats())]:
        if loop.time() > until_s:
            raise Leaked(f"{', '.join(busy)} still hold blocks {SETTLE_S:.0f} s after the last request")
        await asyncio.sleep(0.5)
    for worker in workers.values():
        worker.engine.check()


def _holds_blocks(stats: WorkerStats) -> bool:
    return stats.free_blocks != stats.total_blocks or bool(stats.running or stats.waiting or stats.reserved)
