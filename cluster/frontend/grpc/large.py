"""Large messages, read and tokenized outside the event loop: what `cluster.frontend.preprocessing` runs for gRPC.

Pure but for the tokenizer. Messages come as bytes, since reading them takes as long as there is in them.
"""

from google.protobuf.message import DecodeError

from cluster.frontend.grpc.messages import prompt_from, sampling_from
from cluster.frontend.text import EncodedPrompt, PromptBounds, Tokenizer, encode_apart
from diptych.v1 import inference_pb2
from workers.errors import InvalidRequest

LONGEST_BATCH = 4096
MOST_FIELD_BYTES = 64 << 10  # of a request without its prompt


def read_request(tokenizer: Tokenizer, raw: bytes, bounds: PromptBounds) -> tuple[bytes, EncodedPrompt]:
    """A `GenerateRequest` without its prompt, and this prompt. Raises what the gateway raises for it."""
    request = request_from(raw)
    prompt = encode_apart(tokenizer, prompt_from(request), bounds)
    sampling_from(request.sampling)  # so that lists beyond their bounds go no further
    request.ClearField("prompt")
    if request.ByteSize() > MOST_FIELD_BYTES:
        rule = f"at most {MOST_FIELD_BYTES >> 10} KiB"
        raise InvalidRequest("request", f"has {request.ByteSize()} bytes without its prompt; send {rule}")
    return request.SerializeToString(), prompt


def read_batch(tokenizer: Tokenizer, raw: bytes) -> list[bytes]:
    """The requests of a `GenerateBatchRequest`, each as it came."""
    return requests_from(raw)


def request_from(raw: bytes) -> inference_pb2.GenerateRequest:
    """Raises `InvalidRequest`."""
    try:
        return inference_pb2.GenerateRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequest("request", "cannot be read as GenerateRequest; use the schema of this server") from None


def requests_from(raw: bytes) -> list[bytes]:
    """Raises `InvalidRequest`."""
    try:
        batch = inference_pb2.GenerateBatchRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequest(
            "request", "cannot be read as GenerateBatchRequest; use the schema of this server"
        ) from None
    if not 0 < len(batch.requests) <= LONGEST_BATCH:
        raise InvalidRequest("requests", f"has {len(batch.requests)} requests; a batch has 1 to {LONGEST_BATCH}")
    return [request.SerializeToString() for request in batch.requests]
