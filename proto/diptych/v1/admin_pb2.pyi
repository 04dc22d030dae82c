import datetime

from diptych.v1 import common_pb2 as _common_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GATEWAY_STATE_UNSPECIFIED: _ClassVar[GatewayState]
    GATEWAY_STATE_OPEN: _ClassVar[GatewayState]
    GATEWAY_STATE_SILENT: _ClassVar[GatewayState]
    GATEWAY_STATE_STARTING: _ClassVar[GatewayState]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DEAD: _ClassVar[WorkerState]
GATEWAY_STATE_UNSPECIFIED: GatewayState
GATEWAY_STATE_OPEN: GatewayState
GATEWAY_STATE_SILENT: GatewayState
GATEWAY_STATE_STARTING: GatewayState
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DEAD: WorkerState

class GetClusterRequest(_message.Message):
    __slots__ = ("audit",)
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    audit: bool
    def __init__(self, audit: _Optional[bool] = ...) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("revision", "name", "model", "workers", "links", "gateway", "pools", "decisions", "slo_attainment", "traffic", "events", "served_gateways", "failures", "unlinked", "adapters", "other_models")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    SLO_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SERVED_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    UNLINKED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    OTHER_MODELS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    name: str
    model: Model
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    gateway: Gateway
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    slo_attainment: SLOAttainment
    traffic: _containers.RepeatedCompositeFieldContainer[Traffic]
    events: _containers.RepeatedCompositeFieldContainer[RecentEvent]
    served_gateways: _containers.RepeatedCompositeFieldContainer[ServedGateway]
    failures: _containers.RepeatedCompositeFieldContainer[TaskFailures]
    unlinked: _containers.RepeatedCompositeFieldContainer[UnlinkedPair]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    other_models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, revision: _Optional[int] = ..., name: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., gateway: _Optional[_Union[Gateway, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., slo_attainment: _Optional[_Union[SLOAttainment, _Mapping]] = ..., traffic: _Optional[_Iterable[_Union[Traffic, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RecentEvent, _Mapping]]] = ..., served_gateways: _Optional[_Iterable[_Union[ServedGateway, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[TaskFailures, _Mapping]]] = ..., unlinked: _Optional[_Iterable[_Union[UnlinkedPair, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., other_models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ServedGateway(_message.Message):
    __slots__ = ("name", "state", "restarts", "silences", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SILENCES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: GatewayState
    restarts: int
    silences: int
    detail: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[GatewayState, str]] = ..., restarts: _Optional[int] = ..., silences: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class TaskFailures(_message.Message):
    __slots__ = ("process", "task", "count")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    process: str
    task: str
    count: int
    def __init__(self, process: _Optional[str] = ..., task: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("worker", "prompts", "prompt_tokens", "cached_tokens", "output_tokens", "transfers", "transfer_bytes", "transfer_time", "change", "change_age")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TIME_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_AGE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    transfers: int
    transfer_bytes: int
    transfer_time: _duration_pb2.Duration
    change: str
    change_age: _duration_pb2.Duration
    def __init__(self, worker: _Optional[str] = ..., prompts: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., transfers: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfer_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., change: _Optional[str] = ..., change_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RecentEvent(_message.Message):
    __slots__ = ("kind", "worker", "text", "request_id", "age")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    worker: str
    text: str
    request_id: str
    age: _duration_pb2.Duration
    def __init__(self, kind: _Optional[str] = ..., worker: _Optional[str] = ..., text: _Optional[str] = ..., request_id: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("last", "begin_unix_ns", "end_unix_ns")
    LAST_FIELD_NUMBER: _ClassVar[int]
    BEGIN_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    last: _duration_pb2.Duration
    begin_unix_ns: int
    end_unix_ns: int
    def __init__(self, last: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., begin_unix_ns: _Optional[int] = ..., end_unix_ns: _Optional[int] = ...) -> None: ...

class TracePage(_message.Message):
    __slots__ = ("gateway", "traces", "events", "loads", "complete_from_unix_ns")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FROM_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    traces: _containers.RepeatedCompositeFieldContainer[RequestTrace]
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    loads: _containers.RepeatedCompositeFieldContainer[Load]
    complete_from_unix_ns: int
    def __init__(self, gateway: _Optional[str] = ..., traces: _Optional[_Iterable[_Union[RequestTrace, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[Load, _Mapping]]] = ..., complete_from_unix_ns: _Optional[int] = ...) -> None: ...

class RequestTrace(_message.Message):
    __slots__ = ("request_id", "class_name", "outcome", "detail", "arrived_unix_ns", "ledger", "phase", "open_ns", "prompt_tokens", "cached_tokens", "output_tokens", "attempts", "prefill_worker", "decode_worker", "moves", "transfer_bytes", "transfer_ns", "cached_from")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OPEN_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_NS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FROM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    class_name: str
    outcome: str
    detail: str
    arrived_unix_ns: int
    ledger: _common_pb2.LatencyLedger
    phase: str
    open_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    prefill_worker: str
    decode_worker: str
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    transfer_bytes: int
    transfer_ns: int
    cached_from: _containers.RepeatedCompositeFieldContainer[Count]
    def __init__(self, request_id: _Optional[str] = ..., class_name: _Optional[str] = ..., outcome: _Optional[str] = ..., detail: _Optional[str] = ..., arrived_unix_ns: _Optional[int] = ..., ledger: _Optional[_Union[_common_pb2.LatencyLedger, _Mapping]] = ..., phase: _Optional[str] = ..., open_ns: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., transfer_bytes: _Optional[int] = ..., transfer_ns: _Optional[int] = ..., cached_from: _Optional[_Iterable[_Union[Count, _Mapping]]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("unix_ns", "worker")
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    unix_ns: int
    worker: str
    def __init__(self, unix_ns: _Optional[int] = ..., worker: _Optional[str] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("unix_ns", "kind", "worker", "text", "request_id")
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    unix_ns: int
    kind: str
    worker: str
    text: str
    request_id: str
    def __init__(self, unix_ns: _Optional[int] = ..., kind: _Optional[str] = ..., worker: _Optional[str] = ..., text: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("unix_ns", "worker", "running", "waiting", "queued_tokens", "used_blocks")
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    unix_ns: int
    worker: str
    running: int
    waiting: int
    queued_tokens: int
    used_blocks: int
    def __init__(self, unix_ns: _Optional[int] = ..., worker: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., used_blocks: _Optional[int] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class SLOAttainment(_message.Message):
    __slots__ = ("classes", "outcomes", "refused", "lengths", "queued")
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[ClassScore]
    outcomes: _containers.RepeatedCompositeFieldContainer[Count]
    refused: _containers.RepeatedCompositeFieldContainer[Count]
    lengths: Calibration
    queued: int
    def __init__(self, classes: _Optional[_Iterable[_Union[ClassScore, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., lengths: _Optional[_Union[Calibration, _Mapping]] = ..., queued: _Optional[int] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("name", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class SLOCount(_message.Message):
    __slots__ = ("settled", "kept")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    settled: int
    kept: int
    def __init__(self, settled: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...

class Errors(_message.Message):
    __slots__ = ("p10", "p50", "p90")
    P10_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    p10: float
    p50: float
    p90: float
    def __init__(self, p10: _Optional[float] = ..., p50: _Optional[float] = ..., p90: _Optional[float] = ...) -> None: ...

class ClassScore(_message.Message):
    __slots__ = ("name", "requests", "time_to_first_token", "time_per_output_token", "both", "first_token_errors", "output_token_errors", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BOTH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ERRORS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_ERRORS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    requests: int
    time_to_first_token: SLOCount
    time_per_output_token: SLOCount
    both: SLOCount
    first_token_errors: Errors
    output_token_errors: Errors
    model: str
    def __init__(self, name: _Optional[str] = ..., requests: _Optional[int] = ..., time_to_first_token: _Optional[_Union[SLOCount, _Mapping]] = ..., time_per_output_token: _Optional[_Union[SLOCount, _Mapping]] = ..., both: _Optional[_Union[SLOCount, _Mapping]] = ..., first_token_errors: _Optional[_Union[Errors, _Mapping]] = ..., output_token_errors: _Optional[_Union[Errors, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("answers", "within_p50", "within_p90", "error_tokens", "asked_error_tokens")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_P50_FIELD_NUMBER: _ClassVar[int]
    WITHIN_P90_FIELD_NUMBER: _ClassVar[int]
    ERROR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_ERROR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    answers: int
    within_p50: float
    within_p90: float
    error_tokens: float
    asked_error_tokens: float
    def __init__(self, answers: _Optional[int] = ..., within_p50: _Optional[float] = ..., within_p90: _Optional[float] = ..., error_tokens: _Optional[float] = ..., asked_error_tokens: _Optional[float] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "context_length", "vocab_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_length: int
    vocab_size: int
    def __init__(self, name: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "pool", "role", "state", "incarnation", "node", "pid", "restarts", "capacity_tokens", "age", "memory_bytes", "detail", "stats", "audit", "tensor", "pipeline", "waits_for", "failures")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    role: _common_pb2.PoolRole
    state: WorkerState
    incarnation: str
    node: str
    pid: int
    restarts: int
    capacity_tokens: int
    age: _duration_pb2.Duration
    memory_bytes: int
    detail: str
    stats: WorkerStats
    audit: str
    tensor: int
    pipeline: int
    waits_for: str
    failures: int
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.PoolRole, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., incarnation: _Optional[str] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., restarts: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., detail: _Optional[str] = ..., stats: _Optional[_Union[WorkerStats, _Mapping]] = ..., audit: _Optional[str] = ..., tensor: _Optional[int] = ..., pipeline: _Optional[int] = ..., waits_for: _Optional[str] = ..., failures: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "role", "wanted", "min_replicas", "max_replicas", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _common_pb2.PoolRole
    wanted: int
    min_replicas: int
    max_replicas: int
    model: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.PoolRole, str]] = ..., wanted: _Optional[int] = ..., min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("kind", "worker", "role", "pool", "reason", "outcome", "age")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    worker: str
    role: _common_pb2.PoolRole
    pool: str
    reason: str
    outcome: str
    age: _duration_pb2.Duration
    def __init__(self, kind: _Optional[str] = ..., worker: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.PoolRole, str]] = ..., pool: _Optional[str] = ..., reason: _Optional[str] = ..., outcome: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WarmPromptRequest(_message.Message):
    __slots__ = ("text", "apply_chat_template", "tenant", "pool", "pin")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    APPLY_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    text: str
    apply_chat_template: bool
    tenant: str
    pool: str
    pin: _duration_pb2.Duration
    def __init__(self, text: _Optional[str] = ..., apply_chat_template: _Optional[bool] = ..., tenant: _Optional[str] = ..., pool: _Optional[str] = ..., pin: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WarmPromptResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[CachedPrompt]
    def __init__(self, workers: _Optional[_Iterable[_Union[CachedPrompt, _Mapping]]] = ...) -> None: ...

class UnpinPromptsRequest(_message.Message):
    __slots__ = ("text", "apply_chat_template", "tenant", "pool")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    APPLY_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    text: str
    apply_chat_template: bool
    tenant: str
    pool: str
    def __init__(self, text: _Optional[str] = ..., apply_chat_template: _Optional[bool] = ..., tenant: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class UnpinPromptsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[CachedPrompt]
    def __init__(self, workers: _Optional[_Iterable[_Union[CachedPrompt, _Mapping]]] = ...) -> None: ...

class CachedPrompt(_message.Message):
    __slots__ = ("worker", "tokens", "problem")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    worker: str
    tokens: int
    problem: str
    def __init__(self, worker: _Optional[str] = ..., tokens: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class FlipWorkerRequest(_message.Message):
    __slots__ = ("worker", "role", "expected_revision")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: _common_pb2.PoolRole
    expected_revision: int
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.PoolRole, str]] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class FlipWorkerResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker", "deadline", "expected_revision")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    deadline: _duration_pb2.Duration
    expected_revision: int
    def __init__(self, worker: _Optional[str] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class ScalePoolRequest(_message.Message):
    __slots__ = ("pool", "replicas", "expected_revision")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    expected_revision: int
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class ScalePoolResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "model", "path", "id", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    path: str
    id: str
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., id: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "model", "expected_revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    expected_revision: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "expected_revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected_revision: int
    def __init__(self, name: _Optional[str] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("queued_tokens", "waiting", "running", "reserved", "leases", "free_blocks", "cached_blocks", "quarantined_blocks", "total_blocks", "steps", "step_time", "preemptions", "expired_leases", "bubble_share", "tiers", "sought_tokens", "found_tokens", "fetched_tokens", "fetched_saved_s", "device_saved_s", "device_lent_tokens", "lent_blocks", "borrowed_blocks", "expired_loans", "borrowed")
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SOUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_SAVED_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SAVED_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_LENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BORROWED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LOANS_FIELD_NUMBER: _ClassVar[int]
    BORROWED_FIELD_NUMBER: _ClassVar[int]
    queued_tokens: int
    waiting: int
    running: int
    reserved: int
    leases: int
    free_blocks: int
    cached_blocks: int
    quarantined_blocks: int
    total_blocks: int
    steps: int
    step_time: _duration_pb2.Duration
    preemptions: int
    expired_leases: int
    bubble_share: float
    tiers: _containers.RepeatedCompositeFieldContainer[CacheTier]
    sought_tokens: int
    found_tokens: int
    fetched_tokens: int
    fetched_saved_s: float
    device_saved_s: float
    device_lent_tokens: int
    lent_blocks: int
    borrowed_blocks: int
    expired_loans: int
    borrowed: _containers.RepeatedCompositeFieldContainer[Borrowed]
    def __init__(self, queued_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., reserved: _Optional[int] = ..., leases: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., step_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., preemptions: _Optional[int] = ..., expired_leases: _Optional[int] = ..., bubble_share: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ..., sought_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., fetched_saved_s: _Optional[float] = ..., device_saved_s: _Optional[float] = ..., device_lent_tokens: _Optional[int] = ..., lent_blocks: _Optional[int] = ..., borrowed_blocks: _Optional[int] = ..., expired_loans: _Optional[int] = ..., borrowed: _Optional[_Iterable[_Union[Borrowed, _Mapping]]] = ...) -> None: ...

class Borrowed(_message.Message):
    __slots__ = ("lender", "blocks", "num_bytes", "oldest", "loans", "recalls", "refusals")
    LENDER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    LOANS_FIELD_NUMBER: _ClassVar[int]
    RECALLS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    lender: str
    blocks: int
    num_bytes: int
    oldest: _duration_pb2.Duration
    loans: int
    recalls: int
    refusals: _containers.RepeatedCompositeFieldContainer[Count]
    def __init__(self, lender: _Optional[str] = ..., blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., oldest: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., loans: _Optional[int] = ..., recalls: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[Count, _Mapping]]] = ...) -> None: ...

class CacheTier(_message.Message):
    __slots__ = ("name", "blocks", "capacity_blocks", "block_bytes", "hit_tokens", "read_bytes", "written_bytes", "dropped_blocks", "late", "failures", "problem", "pinned_blocks", "saved_s", "lent_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    LENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks: int
    capacity_blocks: int
    block_bytes: int
    hit_tokens: int
    read_bytes: int
    written_bytes: int
    dropped_blocks: int
    late: int
    failures: int
    problem: str
    pinned_blocks: int
    saved_s: float
    lent_tokens: int
    def __init__(self, name: _Optional[str] = ..., blocks: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., late: _Optional[int] = ..., failures: _Optional[int] = ..., problem: _Optional[str] = ..., pinned_blocks: _Optional[int] = ..., saved_s: _Optional[float] = ..., lent_tokens: _Optional[int] = ...) -> None: ...

class UnlinkedPair(_message.Message):
    __slots__ = ("owner", "reader")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    reader: str
    def __init__(self, owner: _Optional[str] = ..., reader: _Optional[str] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("reader", "owner", "transport", "path", "latency", "bytes_per_second", "skipped")
    READER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    reader: str
    owner: str
    transport: str
    path: str
    latency: _duration_pb2.Duration
    bytes_per_second: float
    skipped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reader: _Optional[str] = ..., owner: _Optional[str] = ..., transport: _Optional[str] = ..., path: _Optional[str] = ..., latency: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., bytes_per_second: _Optional[float] = ..., skipped: _Optional[_Iterable[str]] = ...) -> None: ...

class MeasureStepsRequest(_message.Message):
    __slots__ = ("worker", "chunks", "batch", "context", "swap_bytes", "repeats")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    chunks: _containers.RepeatedCompositeFieldContainer[PromptChunk]
    batch: int
    context: int
    swap_bytes: int
    repeats: int
    def __init__(self, worker: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[PromptChunk, _Mapping]]] = ..., batch: _Optional[int] = ..., context: _Optional[int] = ..., swap_bytes: _Optional[int] = ..., repeats: _Optional[int] = ...) -> None: ...

class PromptChunk(_message.Message):
    __slots__ = ("tokens", "cached")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    cached: int
    def __init__(self, tokens: _Optional[int] = ..., cached: _Optional[int] = ...) -> None: ...

class MeasureStepsResponse(_message.Message):
    __slots__ = ("seconds", "elapsed_seconds", "call_seconds")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    elapsed_seconds: float
    call_seconds: float
    def __init__(self, seconds: _Optional[_Iterable[float]] = ..., elapsed_seconds: _Optional[float] = ..., call_seconds: _Optional[float] = ...) -> None: ...

class Gateway(_message.Message):
    __slots__ = ("name", "active_requests", "max_requests", "uptime")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    active_requests: int
    max_requests: int
    uptime: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., active_requests: _Optional[int] = ..., max_requests: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
