"""A whole cluster in virtual time: production controller, dispatchers, workers and engines over simulated executors."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from cluster.control.scaling_loop import ScalingPolicy
from cluster.dispatch.dispatcher import Dispatcher
from cluster.frontend.context import GatewayContext
from cluster.offline.scoring.records import StepRecord, WorkerRecord
from cluster.offline.sim.case import PoolModel as PoolModel
from cluster.offline.sim.environment import RemoteWorker, SharedMachine, Slowdown
from cluster.runtime.interface import ServiceHandle, WorkerHandle, WorkerOrder
from cluster.runtime.local import LocalRuntime, simulated_worker
from cluster.serving import serve
from cluster.spec import ClusterSpec, PoolSpec, SpecError
from workers.engine.step import StepPlan
from workers.executor.simulated import (
    SMOLLM2_CALLS,
    AttentionCalls,
    Observe,
    Pace,
    SimulatedModel,
    SimulatedRemoteServer,
)
from workers.server import WorkerServer


@dataclass(frozen=True, slots=True)
class Environment:
    """What surrounds the workers. `slowdown`: they share one machine; without it each has its own.

    `frontend_s`: spent in the gateway before a request is dispatched. `stale_s`: age of the worker statistics that
    gateways see; tokens are not delayed. `scaling_policy`: instead of the elastic rule. `multi_step`:
    steps that decode the same sequences run as one, which changes nothing but the time that a simulation takes.
    """

    slowdown: Slowdown | None = None
    frontend_s: float = 0.0
    stale_s: float = 0.0
    scaling_policy: ScalingPolicy | None = None
    multi_step: bool = True


@dataclass(slots=True)
class Meter:
    """Counts the steps of one worker."""

    name: str
    pool: str
    trace: bool
    server: WorkerServer | None = None
    steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    used_block_s: float = 0.0
    records: list[StepRecord] = field(default_factory=list)
    _used: Callable[[], int] | None = None
    _busy_to_s: float = 0.0
    _used_blocks: int = 0
    _used_since_s: float = 0.0
    _plan: StepPlan | None = None
    _counts: tuple[int, int, int] = (0, 0, 0)  # of this plan

    def observe(
        self, plan: StepPlan, seconds: Sequence[float], ends_s: Sequence[float], used: Sequence[int] = ()
    ) -> None:
        """Steps of this plan have ended, each with so many blocks in use (none: one step, and those used now)."""
        if plan is not self._plan:  # steps that run as one are observed in parts
            self._plan, self._counts = plan, _counts(plan)
        batch, prompt_tokens, drawn = self._counts
        self.steps += len(ends_s)
        self.output_tokens += drawn * len(ends_s)
        self.prompt_tokens += prompt_tokens * len(ends_s)
        used_blocks, used = self._used_blocks, used or (self._num_used(),)
        busy_s, busy_to_s, used_block_s, since_s = self.busy_s, self._busy_to_s, self.used_block_s, self._used_since_s
        for took_s, end_s, used_next in zip(seconds, ends_s, used, strict=True):
            begin_s = end_s - took_s
            alone_s = end_s - (begin_s if begin_s > busy_to_s else busy_to_s)
            busy_s += alone_s if alone_s > 0.0 else 0.0
            used_block_s += used_blocks * (end_s - since_s)
            busy_to_s = since_s = end_s
            used_blocks = used_next
        self.busy_s, self._busy_to_s, self.used_block_s, self._used_since_s = busy_s, busy_to_s, used_block_s, since_s
        self._used_blocks = used_blocks
        if self.trace:
            requests = tuple(index_of(chunk.key) for chunk in plan.chunks)
            for took_s, end_s in zip(seconds, ends_s, strict=True):
                step = StepRecord(self.name, end_s - took_s, end_s, prompt_tokens, batch, requests)
                self.records.append(step)

    def _num_used(self) -> int:
        if self._used is None:
            assert self.server is not None, "set when the worker is built"
            self._used = self.server.worker().engine.pool.num_used
        return self._used()

    def settle(self, now_s: float) -> None:
        """Count the blocks used since the last call."""
        self.used_block_s += self._used_blocks * (now_s - self._used_since_s)
        self._used_blocks, self._used_since_s = self._num_used(), now_s

    def record(self, pool: PoolSpec) -> WorkerRecord:
        assert self.server is not None
        stats = self.server.worker().engine.stats()
        return WorkerRecord(
            name=self.name,
            pool=pool.name,
            role=pool.role.value,
            gpus=pool.parallel.world_size,
            kv_blocks=stats.total_blocks,
            steps=self.steps,
            busy_s=self.busy_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            used_block_s=self.used_block_s,
            preemptions=stats.preemptions,
            sources=stats.sources,
        )


def _counts(plan: StepPlan) -> tuple[int, int, int]:
    """A step's decodes, prompt tokens, and sampled tokens."""
    batch = prompt_tokens = drawn = 0
    for chunk in plan.chunks:
        drawn += chunk.draw is not None
        if chunk.draw is not None and len(chunk.tokens) == 1:
            batch += 1
        else:
            prompt_tokens += len(chunk.tokens)
    return batch, prompt_tokens, drawn


def request_id(index: int) -> str:
    """Of a workload's request."""
    return f"w-{index}"


def index_of(key: str) -> int:
    """The workload's index of a sequence key."""
    return int(key.partition("/")[0][2:])


class SimRuntime(LocalRuntime):
    """`LocalRuntime` whose workers are simulated and metered, with calls that take time."""

    def __init__(self, models: Mapping[str, PoolModel], environment: Environment, trace: bool) -> None:
        super().__init__(self._simulated)
        self._models = models
        self._trace = trace
        self._machine = None if environment.slowdown is None else SharedMachine(environment.slowdown)
        self._stale_s = environment.stale_s
        self._servers: dict[str, SimulatedRemoteServer] = {}
        self._multi_step = environment.multi_step
        self.meters: dict[str, list[Meter]] = defaultdict(list)  # worker name -> one for each start

    def _simulated(self, order: WorkerOrder) -> WorkerServer:
        pool = order.config.pool
        model = self._models[pool]
        meter = Meter(order.config.name, pool, self._trace)
        pace = None if self._machine is None else partial(self._machine.spend, pool)
        simulated = _simulated(model, meter.observe, pace, self._servers, multi_step=self._multi_step)
        meter.server = simulated_worker(order, model.cost, simulated)
        self.meters[meter.name].append(meter)
        return meter.server

    async def start_worker(self, order: WorkerOrder) -> WorkerHandle:
        worker = await super().start_worker(order)
        call_s = self._models[order.config.pool].call_s
        if not call_s and not self._stale_s:
            return worker
        return cast(WorkerHandle, RemoteWorker(worker, call_s, self._stale_s))

    async def stop_worker(self, handle: WorkerHandle, grace_s: float) -> None:
        await super().stop_worker(handle.worker if isinstance(handle, RemoteWorker) else handle, grace_s)


@dataclass(slots=True)
class SimCluster:
    """Owned by `open_cluster`."""

    spec: ClusterSpec
    runtime: SimRuntime
    dispatchers: list[Dispatcher]
    controller: ServiceHandle


def virtual(spec: ClusterSpec, models: Mapping[str, PoolModel]) -> ClusterSpec:
    """The same cluster with simulated executors and transfers: no bytes move, so none are digested or converted.

    Engines and routers know the simulated costs, as they would know measured ones. Raises `SpecError`.
    """
    missing = [pool.name for pool in spec.pools if pool.name not in models]
    if missing:
        raise SpecError(f"pools: no model for {', '.join(missing)}")
    transfer = replace(spec.transfer, backends=("simulated",), digest=False, host="127.0.0.1")
    pools = tuple(replace(pool, cost=models[pool.name].cost) for pool in spec.pools)
    gateway = replace(spec.gateway, trace_requests=0)  # no one reads the traces
    return replace(spec, pools=pools, executor="simulated", transfer=transfer, gateway=gateway)


DEFAULT_ENVIRONMENT = Environment()


@asynccontextmanager
async def open_cluster(
    spec: ClusterSpec,
    models: Mapping[str, PoolModel],
    environment: Environment = DEFAULT_ENVIRONMENT,
    *,
    trace: bool = False,
) -> AsyncIterator[SimCluster]:
    """A cluster whose workers are ready. `models` by pool name. Raises what production raises."""
    runtime = SimRuntime(models, environment, trace)
    dispatchers: list[Dispatcher] = []
    serving = await serve(
        virtual(spec, models),
        runtime=runtime,
        make_server=lambda context: _NoServer(context, dispatchers),
        scaling_policy=environment.scaling_policy,
    )
    try:
        yield SimCluster(spec, runtime, dispatchers, serving.controller)
    finally:
        await serving.close()


class _NoServer:
    """Requests go to the dispatcher directly."""

    def __init__(self, context: GatewayContext, dispatchers: list[Dispatcher]) -> None:
        assert isinstance(context.dispatcher, Dispatcher)
        dispatchers.append(context.dispatcher)

    http_url = ""

    async def open(self) -> str:
        return "virtual:0"

    async def close(self, grace_s: float) -> None:
        """Nothing to close."""


def _simulated(
    model: PoolModel,
    observe: Observe,
    pace: Pace | None,
    servers: dict[str, SimulatedRemoteServer],
    *,
    multi_step: bool,
) -> SimulatedModel:
    shape = model.shape
    # One layer and one head of the same size in total, so that re-sharding costs no time to simulate.
    return SimulatedModel(
        num_layers=1,
        num_kv_heads=1,
        head_dim=model.kv_token_bytes // 4,
        dtype="bfloat16",
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        calls=SMOLLM2_CALLS if shape is None else AttentionCalls(shape.layers, shape.heads, shape.head_dim),
        servers=servers,
        observe=observe,
        pace=pace,
        multi_step=multi_step,
        idle_ratio=model.idle_ratio,
    )
