"""The cluster's view to protobuf; the client's side, which reads it, is `diptych.status`. Pure."""

from collections.abc import Iterable

from diptych.shapes import Shape, Timings
from diptych.v1 import admin_pb2
from diptych.view import ClusterView, GatewayView, LinkReport, PoolView, Taken, WorkerView
from diptych.wire import GATEWAY_STATES, ROLES, SAME_NAME, STATES, duration_of


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
        served_gateways=[_gateway_message(each) for each in view.served_gateways],
        failures=[admin_pb2.TaskFailures(process=e.process, task=e.task, count=e.count) for e in view.failures],
    )
    if view.model is not None:
        message.model.name = view.model.name
        message.model.context_length = view.model.context_length
        message.model.vocab_size = view.model.vocab_size
    return message


def _gateway_message(gateway: GatewayView) -> admin_pb2.ServedGateway:
    return admin_pb2.ServedGateway(
        name=gateway.name,
        state=GATEWAY_STATES[gateway.state],
        restarts=gateway.restarts,
        silences=gateway.silences,
        detail=gateway.detail,
    )


def _pool_message(pool: PoolView) -> admin_pb2.Pool:
    return admin_pb2.Pool(
        name=pool.name,
        role=ROLES[pool.role],
        wanted=pool.wanted,
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
    )


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
        failures=worker.failures,
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


def shape_from(message: admin_pb2.MeasureStepsRequest) -> Shape:
    chunks = tuple((chunk.tokens, chunk.cached) for chunk in message.chunks)
    return Shape(chunks, message.batch, message.context, message.swap_bytes)


def timings_message(timings: Timings) -> admin_pb2.MeasureStepsResponse:
    return admin_pb2.MeasureStepsResponse(
        seconds=timings.seconds, elapsed_seconds=timings.elapsed_s, call_seconds=timings.call_s
    )
