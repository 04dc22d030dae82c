"""Settings that server and client share: service names, message sizes and other channel options."""

from diptych.v1 import admin_pb2, inference_pb2

MAX_REQUEST_BYTES = 16 << 20  # as over HTTP; gateway.max_prompt_bytes is half of it by default
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
