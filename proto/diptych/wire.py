"""What server and client must agree on: service names, channel options, and how plain values travel."""

from google.protobuf.duration_pb2 import Duration

from diptych.events import FinishReason
from diptych.v1 import admin_pb2, common_pb2, inference_pb2
from diptych.view import GatewayState, Role, WorkerState

MAX_REQUEST_BYTES = 16 << 20  # as over HTTP; a prompt has half of it unless gateway.max_prompt_bytes says otherwise
MAX_MESSAGE_BYTES = 64 << 20  # of a server
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
RECONNECTING = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 5_000))
CLIENT_SIZES = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
)
SERVER_SIZES = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

FINISH = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
FINISH_FROM = {value: reason for reason, value in FINISH.items()}
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
GATEWAY_STATES = {
    GatewayState.OPEN: admin_pb2.GATEWAY_STATE_OPEN,
    GatewayState.SILENT: admin_pb2.GATEWAY_STATE_SILENT,
    GatewayState.STARTING: admin_pb2.GATEWAY_STATE_STARTING,
}
GATEWAY_STATES_FROM = {value: state for state, value in GATEWAY_STATES.items()}
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


def duration(ns: int) -> Duration:
    message = Duration()
    message.FromNanoseconds(ns)
    return message


def duration_of(seconds: float) -> Duration:
    return duration(round(seconds * 1e9))


def seconds(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9
