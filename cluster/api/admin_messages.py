"""The cluster's view to protobuf and back. Pure."""

from collections.abc import Iterable
from typing import Literal, cast

from cluster.api.messages import duration_of, seconds
from cluster.changes import Taken
from cluster.policy.evidence import Decision
from cluster.spec import Role
from cluster.view import ClusterView, ModelView, PoolView, WorkerState, WorkerView
from diptych.v1 import admin_pb2, common_pb2
from kvtransfer.ticket import LinkReport
from workers.config import ParallelConfig
from workers.shapes import Shape, Timings
from workers.stats import WorkerStats

ROLES = {
    Role.PREFILL: common_pb2.POOL_ROLE_PREFILL,
    Role.DECODE: common_pb2.POOL_ROLE_DECODE,
    Role.MIXED: common_pb2.POOL_ROLE_MIXED,
}
ROLES_FROM = {value: role for role, value in ROLES.items()}
STATES = {
    WorkerState.STARTING: admin_pb2.WORKER_STATE_STARTING,
    WorkerState.READY: admin_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: admin_pb2.WORKER_STATE_DRAINING,
    WorkerState.DEAD: admin_pb2.WORKER_STATE_DEAD,
}
STATES_FROM = {value: state for state, value in STATES.items()}
SAME_NAME = (
    "queued_tokens",
    "waiting",
    "running",
    "reserved",
    "leases",
    "free_blocks",
    "cached_blocks",
    "quarantined_blocks",
    "total_blocks",
    "steps",
    "preemptions",
    "swaps",
    "swapped_blocks",
    "expired_leases",
    "bubble_share",
)


def view_message(
    view: ClusterView, gateway: admin_pb2.Gateway, decisions: Iterable[Taken] = ()
) -> admin_pb2.GetClusterResponse:
    message = admin_pb2.GetClusterResponse(
        revision=view.revision,
        name=view.name,
        workers=[_worker_message(worker) for worker in view.workers],
        links=[_link_message(link) for link in view.links],
        gateway=gateway,
        pools=[_pool_message(pool) for pool in view.pools],
        decisions=[_taken_message(taken) for taken in decisions],
    )
    if view.model is not None:
        message.model.name = view.model.name
        message.model.context_length = view.model.context_length
        message.model.vocab_size = view.model.vocab_size
    return message


def view_from(message: admin_pb2.GetClusterResponse) -> ClusterView:
    told = message.model
    model = ModelView(told.name, told.context_length, told.vocab_size) if message.HasField("model") else None
    workers = tuple(_worker_from(worker) for worker in message.workers)
    links, pools = tuple(map(_link_from, message.links)), tuple(map(_pool_from, message.pools))
    return ClusterView(message.revision, message.name, model, workers, links, pools=pools)


def decisions_from(message: admin_pb2.GetClusterResponse) -> tuple[Taken, ...]:
    return tuple(map(_taken_from, message.decisions))


def _pool_message(pool: PoolView) -> admin_pb2.Pool:
    return admin_pb2.Pool(
        name=pool.name,
        role=ROLES[pool.role],
        wanted=pool.wanted,
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
    )


def _pool_from(message: admin_pb2.Pool) -> PoolView:
    return PoolView(message.name, ROLES_FROM[message.role], message.wanted, message.min_replicas, message.max_replicas)


def _taken_message(taken: Taken) -> admin_pb2.Decision:
    decision = taken.decision
    return admin_pb2.Decision(
        kind=decision.kind,
        worker=decision.worker,
        role=None if decision.role is None else ROLES[decision.role],
        pool=decision.pool,
        reason=decision.reason,
        outcome=taken.outcome,
        age=duration_of(taken.age_s),
    )


def _taken_from(message: admin_pb2.Decision) -> Taken:
    kind = cast(Literal["flip", "grow", "shrink", "plan"], message.kind)
    role = ROLES_FROM.get(message.role)
    decision = Decision(kind, message.reason, message.worker, role, message.pool)
    return Taken(decision, seconds(message.age), message.outcome)


def _worker_message(worker: WorkerView) -> admin_pb2.Worker:
    stats = admin_pb2.WorkerStats(**{name: getattr(worker.stats, name) for name in SAME_NAME})
    stats.step_time.CopyFrom(duration_of(worker.stats.step_s))
    return admin_pb2.Worker(
        name=worker.name,
        pool=worker.pool,
        role=ROLES[worker.role],
        state=STATES[worker.state],
        incarnation=worker.incarnation,
        node=worker.node,
        pid=worker.pid,
        restarts=worker.restarts,
        capacity_tokens=worker.capacity_tokens,
        age=duration_of(worker.age_s),
        memory_bytes=worker.memory_bytes,
        detail=worker.detail,
        waits_for=worker.waits_for,
        audit=worker.audit,
        tensor=worker.parallel.tensor,
        pipeline=worker.parallel.pipeline,
        stats=stats,
    )


def _worker_from(message: admin_pb2.Worker) -> WorkerView:
    same = {name: getattr(message.stats, name) for name in SAME_NAME}
    return WorkerView(
        name=message.name,
        pool=message.pool,
        role=ROLES_FROM[message.role],
        state=STATES_FROM[message.state],
        incarnation=message.incarnation,
        node=message.node,
        pid=message.pid,
        restarts=message.restarts,
        capacity_tokens=message.capacity_tokens,
        age_s=seconds(message.age),
        memory_bytes=message.memory_bytes,
        detail=message.detail,
        waits_for=message.waits_for,
        audit=message.audit,
        parallel=ParallelConfig(max(1, message.tensor), max(1, message.pipeline)),
        stats=WorkerStats(step_s=seconds(message.stats.step_time), **same),
    )


def _link_message(link: LinkReport) -> admin_pb2.Link:
    return admin_pb2.Link(
        reader=link.reader,
        owner=link.owner,
        transport=link.transport,
        path=link.path,
        latency=duration_of(link.latency_s),
        bytes_per_second=link.bytes_per_s,
        skipped=link.skipped,
    )


def _link_from(message: admin_pb2.Link) -> LinkReport:
    return LinkReport(
        reader=message.reader,
        owner=message.owner,
        transport=message.transport,
        path=message.path,
        latency_s=seconds(message.latency),
        bytes_per_s=message.bytes_per_second,
        skipped=tuple(message.skipped),
    )


def measure_message(worker: str, shape: Shape, repeats: int) -> admin_pb2.MeasureStepsRequest:
    return admin_pb2.MeasureStepsRequest(
        worker=worker,
        chunks=[admin_pb2.PromptChunk(tokens=tokens, cached=cached) for tokens, cached in shape.chunks],
        batch=shape.batch,
        context=shape.context,
        swap_bytes=shape.swap_bytes,
        repeats=repeats,
    )


def shape_from(message: admin_pb2.MeasureStepsRequest) -> Shape:
    chunks = tuple((chunk.tokens, chunk.cached) for chunk in message.chunks)
    return Shape(chunks, message.batch, message.context, message.swap_bytes)


def timings_message(timings: Timings) -> admin_pb2.MeasureStepsResponse:
    return admin_pb2.MeasureStepsResponse(
        seconds=timings.seconds, elapsed_seconds=timings.elapsed_s, call_seconds=timings.call_s
    )


def timings_from(message: admin_pb2.MeasureStepsResponse) -> Timings:
    return Timings(tuple(message.seconds), message.elapsed_seconds, message.call_seconds)
