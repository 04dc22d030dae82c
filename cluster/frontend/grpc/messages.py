"""Decodes requests; `diptych.messages` encodes them. Pure but for the tokenizer.

Invalid input is `InvalidRequest` naming the message's field. Requests arrive as bytes, since decoding a large one takes
as long as it is large: `read_request` and `read_batch` run in `cluster.frontend.preprocessing`.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from cluster.frontend.text import (
    ChatPrompt,
    EncodedPrompt,
    PromptBounds,
    TextPrompt,
    Tokenizer,
    TokenPrompt,
    Unencoded,
    encode_apart,
)
from diptych.codec import seconds
from diptych.options import SLO
from diptych.v1 import inference_pb2
from workers.errors import InvalidRequest
from workers.request import SamplingParams

LONGEST_BATCH = 4096
LONGEST_CLASS = 64
MOST_FIELD_BYTES = 64 << 10  # of a request without its prompt
NOTHING: Mapping[str, Any] = {}
# Scalar fields of Sampling, which have the same names in SamplingParams.
SCALARS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "n", "best_of"),
    *("include_stop_in_output", "skip_special_tokens"),
)
M = TypeVar("M", bound=Message)


def read_request(tokenizer: Tokenizer, raw: bytes, bounds: PromptBounds) -> tuple[bytes, EncodedPrompt]:
    """A `GenerateRequest` without its prompt, and the encoded prompt. Raises the gateway's errors for a prompt."""
    request = request_from(raw)
    prompt = encode_apart(tokenizer, prompt_from(request), bounds)
    sampling_from(request.sampling)  # refuses lists that are too long before they are sent on
    request.ClearField("prompt")
    if request.ByteSize() > MOST_FIELD_BYTES:
        rule = f"at most {MOST_FIELD_BYTES >> 10} KiB"
        raise InvalidRequest("request", f"has {request.ByteSize()} bytes without its prompt; send {rule}")
    return request.SerializeToString(), prompt


def read_batch(tokenizer: Tokenizer, raw: bytes) -> list[bytes]:
    """As `requests_from`, for another process."""
    return requests_from(raw)


def request_from(raw: bytes) -> inference_pb2.GenerateRequest:
    return _decoded(inference_pb2.GenerateRequest, raw)


def requests_from(raw: bytes) -> list[bytes]:
    """The requests of a `GenerateBatchRequest`, still encoded."""
    batch = _decoded(inference_pb2.GenerateBatchRequest, raw)
    if not 0 < len(batch.requests) <= LONGEST_BATCH:
        raise InvalidRequest("requests", f"has {len(batch.requests)} requests; a batch has 1 to {LONGEST_BATCH}")
    return [request.SerializeToString() for request in batch.requests]


def _decoded(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        why = f"cannot be read as {kind.DESCRIPTOR.name}; use the schema of this server"
        raise InvalidRequest("request", why) from None


def prompt_from(request: inference_pb2.GenerateRequest) -> Unencoded:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text, apply_chat_template=request.apply_chat_template)
        case "tokens":
            return TokenPrompt(tuple(request.tokens.ids))
        case "chat":
            messages = tuple((each.role, each.content) for each in request.chat.messages)
            return ChatPrompt(messages, tuple(request.chat.tools))
        case _:
            raise InvalidRequest("prompt", "is missing; give one of text, tokens or chat")


def sampling_from(message: inference_pb2.Sampling, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
    """`defaults` apply to fields that are not set."""
    given = {name: getattr(message, name) for name in SCALARS if message.HasField(name)}
    return SamplingParams(
        **{**defaults, **given},
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def slo_from(message: inference_pb2.Slo) -> SLO:
    def wanted_s(name: str) -> float | None:
        if not message.HasField(name):
            return None
        value_s = seconds(getattr(message, name))
        if not value_s > 0.0:
            rule = "it must be above 0, or absent where nothing is wanted"
            raise InvalidRequest(f"slo.{name}", f"is {value_s:g} s; {rule}")
        return value_s

    name = checked_class(message.class_name or "default", "slo.class_name")
    return SLO(wanted_s("time_to_first_token"), wanted_s("time_per_output_token"), name)


def checked_class(name: str, field: str) -> str:
    """The name of an SLO class. Raises `InvalidRequest` if it cannot be one."""
    if len(name) > LONGEST_CLASS or not all(" " < letter <= "~" for letter in name):
        rule = f"must be at most {LONGEST_CLASS} visible ASCII characters"
        raise InvalidRequest(field, f"{name[:40]!r} cannot be used; it {rule}")
    return name
