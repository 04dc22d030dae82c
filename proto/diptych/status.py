"""What the admin service answers, as values, and what it is asked: the client's side of the wire. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, cast

from diptych.history import Happening, Load, Recent, RequestTrace, Traffic, Window
from diptych.messages import ledger_from
from diptych.shapes import Shape, Timings
from diptych.slo import Calibration, ClassScore, Errors, Kept, SLOAttainment
from diptych.v1 import admin_pb2
from diptych.view import (
    ClusterView,
    Decision,
    GatewayView,
    LinkReport,
    ModelView,
    ParallelConfig,
    PoolView,
    Taken,
    TaskFailures,
    WorkerStats,
    WorkerView,
)
from diptych.wire import GATEWAY_STATES_FROM, ROLES_FROM, SAME_NAME, STATES_FROM, seconds


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The view of the gateway that answered, its load, what the elastic policy decided lately, promises kept, and what
    went through each worker."""

    view: ClusterView
    gateway: str
    active_requests: int
    max_requests: int
    decisions: tuple[Taken, ...] = ()
    standing: SLOAttainment = field(default_factory=SLOAttainment)
    recent: Recent = field(default_factory=Recent)

    @staticmethod
    def read(message: admin_pb2.GetClusterResponse) -> "ClusterStatus":
        return ClusterStatus(
            view_from(message),
            message.gateway.name,
            message.gateway.active_requests,
            message.gateway.max_requests,
            decisions_from(message),
            standing_from(message.standing),
            recent_from(message),
        )


def view_from(message: admin_pb2.GetClusterResponse) -> ClusterView:
    told = message.model
    model = ModelView(told.name, told.context_length, told.vocab_size) if message.HasField("model") else None
    workers = tuple(_worker_from(worker) for worker in message.workers)
    links, pools = tuple(map(_link_from, message.links)), tuple(map(_pool_from, message.pools))
    served = tuple(map(_gateway_from, message.served_gateways))
    failures = tuple(TaskFailures(each.process, each.task, each.count) for each in message.failures)
    named = message.revision, message.name, model, workers, links
    return ClusterView(*named, pools=pools, served_gateways=served, failures=failures)


def decisions_from(message: admin_pb2.GetClusterResponse) -> tuple[Taken, ...]:
    return tuple(map(_taken_from, message.decisions))


def _gateway_from(message: admin_pb2.ServedGateway) -> GatewayView:
    state = GATEWAY_STATES_FROM[message.state]
    return GatewayView(message.name, state, message.restarts, message.silences, message.detail)


def _pool_from(message: admin_pb2.Pool) -> PoolView:
    return PoolView(message.name, ROLES_FROM[message.role], message.wanted, message.min_replicas, message.max_replicas)


def _taken_from(message: admin_pb2.Decision) -> Taken:
    kind = cast(Literal["flip", "grow", "shrink"], message.kind)
    role = ROLES_FROM.get(message.role)
    decision = Decision(kind, message.reason, message.worker, role, message.pool)
    return Taken(decision, seconds(message.age), message.outcome)


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
        failures=message.failures,
        capacity_tokens=message.capacity_tokens,
        age_s=seconds(message.age),
        memory_bytes=message.memory_bytes,
        detail=message.detail,
        waits_for=message.waits_for,
        audit=message.audit,
        parallel=ParallelConfig(max(1, message.tensor), max(1, message.pipeline)),
        stats=WorkerStats(step_s=seconds(message.stats.step_time), **same),
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


def timings_from(message: admin_pb2.MeasureStepsResponse) -> Timings:
    return Timings(tuple(message.seconds), message.elapsed_seconds, message.call_seconds)


def recent_from(message: admin_pb2.GetClusterResponse) -> Recent:
    """The happenings' own times are of a clock that is not ours: 0."""
    traffic = (
        (
            told.worker,
            Traffic(
                prompts=told.prompts,
                prompt_tokens=told.prompt_tokens,
                cached_tokens=told.cached_tokens,
                output_tokens=told.output_tokens,
                transfers=told.transfers,
                transfer_bytes=told.transfer_bytes,
                transfer_s=seconds(told.transfer_time),
                change=told.change,
                changed_ns=told.change_age.ToNanoseconds(),
            ),
        )
        for told in message.traffic
    )
    happenings = (
        (seconds(each.age), Happening(0, each.kind, each.worker, each.text, each.request_id))
        for each in message.happenings
    )
    return Recent(seconds(message.gateway.uptime), tuple(traffic), tuple(happenings))


def window_from(messages: Iterable[admin_pb2.TracePage]) -> Window:
    """All pages as one; nanoseconds of the time of day."""
    told = tuple(messages)
    return Window(
        tuple(_trail_from(each) for page in told for each in page.trails),
        tuple(_moment_from(each) for page in told for each in page.moments),
        tuple(_load_from(each) for page in told for each in page.loads),
        max((page.complete_from_unix_ns for page in told), default=0),
    )


def _trail_from(message: admin_pb2.Trail) -> RequestTrace:
    return RequestTrace(
        request_id=message.request_id,
        class_name=message.class_name,
        outcome=message.outcome,
        detail=message.detail,
        arrived_ns=message.arrived_unix_ns,
        ledger=ledger_from(message.ledger),
        phase=message.phase,
        open_ns=message.open_ns,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        attempts=message.attempts,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        moves=tuple((move.unix_ns, move.worker) for move in message.moves),
        transfer_bytes=message.transfer_bytes,
        transfer_ns=message.transfer_ns,
    )


def _moment_from(each: admin_pb2.Moment) -> Happening:
    return Happening(each.unix_ns, each.kind, each.worker, each.text, each.request_id)


def _load_from(each: admin_pb2.Load) -> Load:
    return Load(each.unix_ns, each.worker, each.running, each.waiting, each.queued_tokens, each.used_blocks)


def standing_from(message: admin_pb2.Standing) -> SLOAttainment:
    told = message.lengths
    return SLOAttainment(
        classes=tuple(map(_class_from, message.classes)),
        outcomes=_counts_from(message.outcomes),
        refused=_counts_from(message.refused),
        calibration=Calibration(
            told.answers,
            told.within_p50,
            told.within_p90,
            told.bucket_share,
            told.error_tokens,
            told.asked_error_tokens,
        ),
        queued=message.queued,
    )


def _class_from(message: admin_pb2.ClassScore) -> ClassScore:
    def errors(name: str) -> Errors | None:
        found: admin_pb2.Errors = getattr(message, name)
        return Errors(found.p10, found.p50, found.p90) if message.HasField(name) else None

    return ClassScore(
        name=message.name,
        requests=message.requests,
        ttft=_kept_from(message.time_to_first_token),
        tpot=_kept_from(message.time_per_output_token),
        both=_kept_from(message.both),
        ttft_errors=errors("first_token_errors"),
        tpot_errors=errors("output_token_errors"),
    )


def _kept_from(message: admin_pb2.Kept) -> Kept:
    return Kept(message.settled, message.kept)


def _counts_from(messages: Iterable[admin_pb2.Count]) -> tuple[tuple[str, int], ...]:
    return tuple((message.name, message.count) for message in messages)
