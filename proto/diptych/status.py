"""Converts the cluster, a gateway's history and step timings to and from messages of the admin service. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from diptych.codec import NANOSECONDS, SAME, SECONDS, Codec, Pair, duration_of, enum, repeated, seconds
from diptych.history import ClusterEvent, Load, Recent, RequestTrace, Traffic, Window
from diptych.messages import LEDGER
from diptych.shapes import Shape, Timings
from diptych.slo import Calibration, ClassScore, Errors, SLOAttainment, SLOCount
from diptych.v1 import admin_pb2, common_pb2
from diptych.view import (
    Adapter,
    BorrowStats,
    CachedPrompt,
    ClusterView,
    Decision,
    DecisionRecord,
    GatewayState,
    GatewayView,
    LinkReport,
    ModelView,
    ParallelConfig,
    PoolView,
    Role,
    TaskFailures,
    TierStats,
    WorkerState,
    WorkerStats,
    WorkerView,
)

PAGE_TRACES, PAGE_POINTS = 256, 4096  # under half a megabyte each

ROLE = enum(Role, common_pb2.PoolRole, "POOL_ROLE_")
OPTIONAL_ROLE = enum(Role, common_pb2.PoolRole, "POOL_ROLE_", optional=True)


# ---- the cluster -------------------------------------------------------------------------------------------------

CACHED_PROMPT = Codec(CachedPrompt, admin_pb2.CachedPrompt)
TIER = Codec(TierStats, admin_pb2.CacheTier)
COUNTS = repeated(
    Pair(
        lambda count: admin_pb2.Count(name=count[0], count=count[1]),
        lambda message: (message.name, message.count),
    )
)
BORROWED = Codec(BorrowStats, admin_pb2.Borrowed, oldest_s=("oldest", SECONDS), refusals=("refusals", COUNTS))
_WORKER_STATS = Codec(
    WorkerStats,
    admin_pb2.WorkerStats,
    step_s=("step_time", SECONDS),
    tiers=("tiers", repeated(TIER)),
    borrowed=("borrowed", repeated(BORROWED)),
)
_WORKER = Codec(
    WorkerView,
    admin_pb2.Worker,
    role=("role", ROLE),
    state=("state", enum(WorkerState, admin_pb2.WorkerState, "WORKER_STATE_")),
    age_s=("age", SECONDS),
    stats=("stats", _WORKER_STATS),
)
WORKER = Pair(
    lambda worker: _WORKER.encode(worker, tensor=worker.parallel.tensor, pipeline=worker.parallel.pipeline),
    lambda message: _WORKER.decode(message, parallel=ParallelConfig(max(1, message.tensor), max(1, message.pipeline))),
)
LINK = Codec(LinkReport, admin_pb2.Link, latency_s=("latency", SECONDS), bytes_per_s=("bytes_per_second", SAME))
UNLINKED = Pair(
    lambda pairs: [admin_pb2.UnlinkedPair(owner=owner, reader=reader) for owner, reader in sorted(pairs)],
    lambda messages: frozenset((each.owner, each.reader) for each in messages),
)
POOL = Codec(PoolView, admin_pb2.Pool, role=("role", ROLE))
GATEWAY = Codec(
    GatewayView,
    admin_pb2.ServedGateway,
    state=("state", enum(GatewayState, admin_pb2.GatewayState, "GATEWAY_STATE_")),
)
FAILURES = Codec(TaskFailures, admin_pb2.TaskFailures)
MODEL = Codec(ModelView, admin_pb2.Model)
ADAPTER = Codec(Adapter, admin_pb2.Adapter)
VIEW = Codec(
    ClusterView,
    admin_pb2.GetClusterResponse,
    model=("model", MODEL),
    workers=("workers", repeated(WORKER)),
    links=("links", repeated(LINK)),
    unlinked=("unlinked", UNLINKED),
    pools=("pools", repeated(POOL)),
    served_gateways=("served_gateways", repeated(GATEWAY)),
    failures=("failures", repeated(FAILURES)),
    adapters=("adapters", repeated(ADAPTER)),
    other_models=("other_models", repeated(MODEL)),
)
_DECISION = Codec(Decision, admin_pb2.Decision, role=("role", OPTIONAL_ROLE))
DECISION_RECORD = Pair(
    lambda taken: _DECISION.encode(taken.decision, age=duration_of(taken.age_s), outcome=taken.outcome),
    lambda message: DecisionRecord(_DECISION.decode(message), seconds(message.age), message.outcome),
)

# ---- SLOs ------------------------------------------------------------------------------------------------------

SLO_COUNT = Codec(SLOCount, admin_pb2.SLOCount)
ERRORS = Codec(Errors, admin_pb2.Errors)
CLASS = Codec(
    ClassScore,
    admin_pb2.ClassScore,
    ttft=("time_to_first_token", SLO_COUNT),
    tpot=("time_per_output_token", SLO_COUNT),
    both=("both", SLO_COUNT),
    ttft_errors=("first_token_errors", ERRORS),
    tpot_errors=("output_token_errors", ERRORS),
)
ATTAINMENT = Codec(
    SLOAttainment,
    admin_pb2.SLOAttainment,
    classes=("classes", repeated(CLASS)),
    outcomes=("outcomes", COUNTS),
    refused=("refused", COUNTS),
    calibration=("lengths", Codec(Calibration, admin_pb2.Calibration)),
)

# ---- history -----------------------------------------------------------------------------------------------------

_TRAFFIC = Codec(
    Traffic, admin_pb2.Traffic, transfer_s=("transfer_time", SECONDS), changed_ns=("change_age", NANOSECONDS)
)
_RECENT_EVENT = Codec(ClusterEvent, admin_pb2.RecentEvent)
TRAFFIC = repeated(
    Pair(
        lambda named: _TRAFFIC.encode(named[1], worker=named[0]),
        lambda message: (message.worker, _TRAFFIC.decode(message)),
    )
)
RECENT_EVENTS = repeated(
    Pair(
        lambda aged: _RECENT_EVENT.encode(aged[1], age=duration_of(aged[0])),
        lambda message: (seconds(message.age), _RECENT_EVENT.decode(message, at_ns=0)),  # clocks differ
    )
)
MOVES = repeated(
    Pair(
        lambda move: admin_pb2.Move(unix_ns=move[0], worker=move[1]),
        lambda message: (message.unix_ns, message.worker),
    )
)
TRACE = Codec(
    RequestTrace,
    admin_pb2.RequestTrace,
    arrived_ns=("arrived_unix_ns", SAME),
    ledger=("ledger", LEDGER),
    moves=("moves", MOVES),
    cached_from=("cached_from", COUNTS),
)
EVENT = Codec(ClusterEvent, admin_pb2.ClusterEvent, at_ns=("unix_ns", SAME))
LOAD = Codec(Load, admin_pb2.Load, at_ns=("unix_ns", SAME))


def trace_pages(window: Window, gateway: str) -> Iterator[admin_pb2.TracePage]:
    """A window as messages, at least one. Its times are Unix nanoseconds."""
    traces, events, loads = window.traces, window.events, window.loads
    while True:
        yield admin_pb2.TracePage(
            gateway=gateway,
            traces=map(TRACE.encode, traces[:PAGE_TRACES]),
            events=map(EVENT.encode, events[:PAGE_TRACES]),
            loads=map(LOAD.encode, loads[:PAGE_POINTS]),
            complete_from_unix_ns=window.whole_ns,
        )
        traces, events, loads = traces[PAGE_TRACES:], events[PAGE_TRACES:], loads[PAGE_POINTS:]
        if not (traces or events or loads):
            return


def window_from(messages: Iterable[admin_pb2.TracePage]) -> Window:
    """The window of all pages, in Unix nanoseconds."""
    pages = tuple(messages)
    return Window(
        tuple(TRACE.decode(each) for page in pages for each in page.traces),
        tuple(EVENT.decode(each) for page in pages for each in page.events),
        tuple(LOAD.decode(each) for page in pages for each in page.loads),
        max((page.complete_from_unix_ns for page in pages), default=0),
    )


# ---- step timings --------------------------------------------------------------------------------------------------

CHUNKS = repeated(
    Pair(
        lambda chunk: admin_pb2.PromptChunk(tokens=chunk[0], cached=chunk[1]),
        lambda message: (message.tokens, message.cached),
    )
)
SHAPE = Codec(Shape, admin_pb2.MeasureStepsRequest, chunks=("chunks", CHUNKS))
TIMINGS = Codec(
    Timings,
    admin_pb2.MeasureStepsResponse,
    elapsed_s=("elapsed_seconds", SAME),
    call_s=("call_seconds", SAME),
)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster as one gateway sees it: view, load, scaling decisions, SLO attainment, traffic and events."""

    view: ClusterView
    gateway: str
    active_requests: int
    max_requests: int
    decisions: tuple[DecisionRecord, ...] = ()
    slo_attainment: SLOAttainment = field(default_factory=SLOAttainment)
    recent: Recent = field(default_factory=Recent)

    @staticmethod
    def read(message: admin_pb2.GetClusterResponse) -> "ClusterStatus":
        gateway = message.gateway
        return ClusterStatus(
            VIEW.decode(message),
            gateway.name,
            gateway.active_requests,
            gateway.max_requests,
            tuple(map(DECISION_RECORD.decode, message.decisions)),
            ATTAINMENT.decode(message.slo_attainment),
            Recent(seconds(gateway.uptime), TRAFFIC.decode(message.traffic), RECENT_EVENTS.decode(message.events)),
        )

    def message(self) -> admin_pb2.GetClusterResponse:
        gateway = admin_pb2.Gateway(
            name=self.gateway,
            active_requests=self.active_requests,
            max_requests=self.max_requests,
            uptime=duration_of(self.recent.uptime_s),
        )
        message: admin_pb2.GetClusterResponse = VIEW.encode(
            self.view,
            gateway=gateway,
            decisions=map(DECISION_RECORD.encode, self.decisions),
            slo_attainment=ATTAINMENT.encode(self.slo_attainment),
            traffic=TRAFFIC.encode(self.recent.traffic),
            events=RECENT_EVENTS.encode(self.recent.events),
        )
        return message
