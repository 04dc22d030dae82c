"""Converts requests and events to and from messages of the inference service. Pure.

The client encodes requests and decodes events; the server encodes events. `cluster.frontend.grpc.messages` decodes
requests.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from diptych.codec import (
    NANOSECONDS,
    SAME,
    SECONDS,
    Codec,
    Converter,
    Pair,
    duration,
    duration_of,
    enum,
    repeated,
)
from diptych.errors import DiptychError
from diptych.events import (
    Accepted,
    AnswerEnd,
    Completed,
    FinishReason,
    LatencyLedger,
    Queued,
    TextDelta,
    TextEvent,
    TokenLogprobs,
    TransferReport,
)
from diptych.options import SLO, Messages, Prompt, RequestOptions, SamplingOptions
from diptych.v1 import common_pb2, inference_pb2


def _encode_logprobs(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return inference_pb2.TokenLogprobs(chosen=logprobs.chosen, top=top)


def _decode_logprobs(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.chosen, tuple((top.token_id, top.logprob) for top in message.top))


LOGPROBS = repeated(Pair(_encode_logprobs, _decode_logprobs))


def _encode_delta(delta: TextDelta) -> inference_pb2.Delta:
    """Without a `Codec`, which takes twice as long: there may be one delta per token."""
    return inference_pb2.Delta(
        text=delta.text,
        token_ids=delta.tokens,
        first_position=delta.first_position,
        logprobs=LOGPROBS.encode(delta.logprobs),
        prompt_logprobs=LOGPROBS.encode(delta.prompt_logprobs),
        index=delta.index,
    )


def _decode_delta(message: inference_pb2.Delta) -> TextDelta:
    return TextDelta(
        text=message.text,
        tokens=tuple(message.token_ids),
        first_position=message.first_position,
        logprobs=LOGPROBS.decode(message.logprobs),
        prompt_logprobs=LOGPROBS.decode(message.prompt_logprobs),
        index=message.index,
    )


FINISH = enum(FinishReason, common_pb2.FinishReason, "FINISH_REASON_")
LEDGER_PARTS = repeated(
    Pair(
        lambda part: common_pb2.LedgerPart(phase=part[0], duration=duration(part[1])),
        lambda message: (message.phase, message.duration.ToNanoseconds()),
    )
)
LEDGER = Codec(
    LatencyLedger,
    common_pb2.LatencyLedger,
    first=("first", LEDGER_PARTS),
    rest=("rest", LEDGER_PARTS),
    ttft_ns=("time_to_first_token", NANOSECONDS),
    total_ns=("total", NANOSECONDS),
)
TRANSFER = Codec(
    TransferReport,
    common_pb2.TransferReport,
    num_blocks=("blocks", SAME),
    num_bytes=("bytes", SAME),
    num_reads=("reads", SAME),
    num_descriptors=("descriptors", SAME),
    busy_s=("busy", SECONDS),
    digest_s=("digest_time", SECONDS),
    elapsed_s=("elapsed", SECONDS),
)
QUEUED = Codec(
    Queued,
    inference_pb2.Queued,
    predicted_start_s=("predicted_start", SECONDS),
    predicted_ttft_s=("predicted_time_to_first_token", SECONDS),
)
ACCEPTED = Codec(
    Accepted,
    inference_pb2.Accepted,
    predicted_ttft_s=("predicted_time_to_first_token", SECONDS),
    predicted_tpot_s=("predicted_time_per_output_token", SECONDS),
)
DELTA = Pair(_encode_delta, _decode_delta)
ANSWER_END = Codec(AnswerEnd, inference_pb2.AnswerEnd, finish=("finish_reason", FINISH), ledger=("ledger", LEDGER))
_COMPLETED = Codec(
    Completed,
    inference_pb2.Completed,
    finish=("finish_reason", FINISH),
    ledger=("ledger", LEDGER),
    transfers=("transfers", repeated(TRANSFER)),
    answers=("answers", repeated(ANSWER_END)),
)


def _encode_completed(event: Completed) -> inference_pb2.Completed:
    usage = common_pb2.Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        cached_prompt_tokens=event.cached_tokens,
    )
    message: inference_pb2.Completed = _COMPLETED.encode(event, usage=usage)
    return message


def _decode_completed(message: inference_pb2.Completed) -> Completed:
    return _COMPLETED.decode(
        message,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        cached_tokens=message.usage.cached_prompt_tokens,
    )


COMPLETED = Pair(_encode_completed, _decode_completed)
GRAMMARS = ("json_schema", "regex", "choice", "lark")
EVENTS = {Queued: "queued", Accepted: "accepted", TextDelta: "delta", Completed: "completed"}
CODECS: dict[str, Converter] = {"queued": QUEUED, "accepted": ACCEPTED, "delta": DELTA, "completed": COMPLETED}


def event_message(event: TextEvent) -> inference_pb2.GenerateResponse:
    name = EVENTS[type(event)]
    return inference_pb2.GenerateResponse(**{name: CODECS[name].encode(event)})


def events_from(message: inference_pb2.GenerateResponse) -> list[TextEvent]:
    """The event; for a Completed with whole answers, one delta per answer and then the Completed."""
    name = message.WhichOneof("event")
    if name is None:
        return []  # an event of a newer server
    outputs = [DELTA.decode(each) for each in message.completed.outputs] if name == "completed" else []
    return [*outputs, CODECS[name].decode(getattr(message, name))]


def request_message(
    prompt: Prompt | None = None,
    messages: Messages | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    **options: Unpack[RequestOptions],
) -> inference_pb2.GenerateRequest:
    """The message of a request, without `timeout_s`. Raises `DiptychError` if a field cannot hold its value."""
    options.pop("timeout_s", None)
    slo = options.pop("slo", None)
    request = inference_pb2.GenerateRequest(
        request_id=options.pop("request_id", ""),
        model=options.pop("model", ""),
        session_id=options.pop("session", ""),
        tenant=options.pop("tenant", ""),
        slo=None if slo is None else _slo_message(slo),
    )
    request.sampling.CopyFrom(_sampling_message(options))
    try:
        if messages is not None:
            request.chat.SetInParent()
            for message in messages:
                role, content = _role_and_content(message)
                request.chat.messages.add(role=role, content=content)
            request.chat.tools.extend(json.dumps(tool) for tool in tools)
        elif isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.SetInParent()
            request.tokens.ids.extend(prompt or ())
    except (TypeError, ValueError) as error:
        raise DiptychError("INVALID_ARGUMENT", f"prompt: {error}", field="prompt") from None
    return request


def _role_and_content(message: tuple[str, str] | Mapping[str, str]) -> tuple[str, str]:
    try:
        if isinstance(message, Mapping):
            return message["role"], message["content"]
        role, content = message
        return role, content
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"{message!r} is not a message; give (role, content)") from None


def _sampling_message(options: SamplingOptions) -> inference_pb2.Sampling:
    message = inference_pb2.Sampling()
    value: Any  # the message checks its type
    for name, value in options.items():
        if value is None:
            continue
        try:
            if name in ("stop", "stop_token_ids"):
                getattr(message, name).extend([value] if isinstance(value, str) else value)
            elif name == "logit_bias":
                message.logit_bias.update(value)
            elif name in GRAMMARS and (other := message.WhichOneof("grammar")):
                why = f"sampling.{name}: leave it out; an answer has one grammar, and {other} is given"
                raise DiptychError("INVALID_ARGUMENT", why, field=f"sampling.{name}")
            elif name in ("json_schema", "choice") and not isinstance(value, str):
                setattr(message, name, json.dumps(value))
            else:
                setattr(message, name, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise _invalid(f"sampling.{name}", value, error) from None
    return message


def _slo_message(slo: SLO) -> inference_pb2.Slo:
    message = inference_pb2.Slo(class_name=slo.class_name)
    for name, seconds in (("time_to_first_token", slo.ttft_s), ("time_per_output_token", slo.tpot_s)):
        if seconds is not None:
            try:
                getattr(message, name).CopyFrom(duration_of(seconds))
            except (TypeError, ValueError, OverflowError) as error:
                raise _invalid(f"slo.{name}", seconds, error) from None
    return message


def _invalid(field: str, value: object, error: Exception) -> DiptychError:
    return DiptychError("INVALID_ARGUMENT", f"{field}: cannot be {value!r} ({error})", field=field)
