"""Decodes requests; `diptych.messages` encodes them. Pure, except for the tokenizer.

Invalid input raises `InvalidRequest` with the message's field. `cluster.frontend.preprocessing` runs the functions
`read_...`, because decoding a large message blocks.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from cluster.frontend.request_limits import MAX_CLASS_CHARS, checked_name
from cluster.frontend.text import (
    ChatPrompt,
    EncodedPrompt,
    PromptBounds,
    RawPrompt,
    TextPrompt,
    Tokenizer,
    TokenPrompt,
    encode_packed,
)
from diptych.codec import seconds
from diptych.options import SLO
from diptych.v1 import inference_pb2
from workers.errors import InvalidRequest
from workers.request import Grammar, SamplingParams

MAX_BATCH_REQUESTS = 4096
MAX_FIELD_BYTES = 64 << 10  # of a request without its prompt
NOTHING: Mapping[str, Any] = {}
# Scalar fields of Sampling, with the same names as in SamplingParams.
SCALARS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "n", "best_of"),
    *("include_stop_in_output", "skip_special_tokens"),
)
# Fields of the same oneof, and the kinds of `Grammar`.
GRAMMARS: Mapping[str, Any] = {"json_schema": "json", "regex": "regex", "choice": "choice", "lark": "grammar"}
M = TypeVar("M", bound=Message)


def read_request(tokenizer: Tokenizer, raw: bytes, bounds: PromptBounds) -> tuple[bytes, EncodedPrompt]:
    """A `GenerateRequest` without its prompt, and the encoded prompt. Raises the gateway's errors for a prompt."""
    request = request_from(raw)
    prompt = encode_packed(tokenizer, prompt_from(request), bounds)
    sampling_from(request.sampling)  # refuses lists that are too long before they are sent on
    request.ClearField("prompt")
    if request.ByteSize() > MAX_FIELD_BYTES:
        rule = f"at most {MAX_FIELD_BYTES >> 10} KiB"
        raise InvalidRequest("request", f"has {request.ByteSize()} bytes without its prompt; send {rule}")
    return request.SerializeToString(), prompt


def read_batch(tokenizer: Tokenizer, raw: bytes) -> list[bytes]:
    """Like `requests_from`, with the signature for preprocessing."""
    return requests_from(raw)


def read_model(tokenizer: Tokenizer, raw: bytes) -> str:
    """The model that a `GenerateRequest` names."""
    return request_from(raw).model


def request_from(raw: bytes) -> inference_pb2.GenerateRequest:
    return _decoded(inference_pb2.GenerateRequest, raw)


def requests_from(raw: bytes) -> list[bytes]:
    """The requests of a `GenerateBatchRequest`, still encoded."""
    batch = _decoded(inference_pb2.GenerateBatchRequest, raw)
    if not 0 < len(batch.requests) <= MAX_BATCH_REQUESTS:
        raise InvalidRequest("requests", f"has {len(batch.requests)} requests; a batch has 1 to {MAX_BATCH_REQUESTS}")
    return [request.SerializeToString() for request in batch.requests]


def _decoded(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        why = f"cannot be decoded as {kind.DESCRIPTOR.name}; use the schema of this server"
        raise InvalidRequest("request", why) from None


def prompt_from(request: inference_pb2.GenerateRequest) -> RawPrompt:
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
    grammar = message.WhichOneof("grammar")
    return SamplingParams(
        **{**defaults, **given},
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        grammar=None if grammar is None else Grammar(GRAMMARS[grammar], getattr(message, grammar)),
    )


def slo_from(message: inference_pb2.Slo) -> SLO:
    def slo_s(name: str) -> float | None:
        if not message.HasField(name):
            return None
        value_s = seconds(getattr(message, name))
        if not value_s > 0.0:
            raise InvalidRequest(f"slo.{name}", f"is {value_s:g} s; it must be above 0, or absent for none")
        return value_s

    name = checked_name("slo.class_name", message.class_name or "default", MAX_CLASS_CHARS)
    return SLO(slo_s("time_to_first_token"), slo_s("time_per_output_token"), name)
