"""Requests as messages, and the messages of an answer as events: the client's side of the wire. Pure."""

from typing import Any

from diptych.errors import DiptychError
from diptych.events import (
    Accepted,
    AnswerEnd,
    Completed,
    LatencyLedger,
    Queued,
    TextDelta,
    TextEvent,
    TokenLogprobs,
    TransferReport,
)
from diptych.options import SLO, SamplingOptions
from diptych.v1 import common_pb2, inference_pb2
from diptych.wire import FINISH_FROM, duration_of, seconds


def sampling_message(options: SamplingOptions) -> inference_pb2.Sampling:
    """Raises `DiptychError` for a value that no field can hold."""
    message = inference_pb2.Sampling()
    value: Any  # of a type that the message checks
    for name, value in options.items():
        if value is None:
            continue
        try:
            if name in ("stop", "stop_token_ids"):
                getattr(message, name).extend([value] if isinstance(value, str) else value)
            elif name == "logit_bias":
                message.logit_bias.update(value)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise _wrong(f"sampling.{name}", value, error) from None
    return message


def slo_message(slo: SLO) -> inference_pb2.Slo:
    """Raises `DiptychError` for a value that no field can hold."""
    message = inference_pb2.Slo(class_name=slo.class_name)
    for name, wanted_s in (("time_to_first_token", slo.ttft_s), ("time_per_output_token", slo.tpot_s)):
        if wanted_s is not None:
            try:
                getattr(message, name).CopyFrom(duration_of(wanted_s))
            except (TypeError, ValueError, OverflowError) as error:
                raise _wrong(f"slo.{name}", wanted_s, error) from None
    return message


def events_from(message: inference_pb2.GenerateResponse) -> list[TextEvent]:
    """One event; for a Completed that carries whole answers, these as deltas and then the end."""
    match message.WhichOneof("event"):
        case "queued":
            return [_queued_from(message.queued)]
        case "accepted":
            return [_accepted_from(message.accepted)]
        case "delta":
            return [_delta_from(message.delta)]
        case "completed":
            return [*map(_delta_from, message.completed.outputs), _completed_from(message.completed)]
        case _:
            return []  # an event of a newer server


def _queued_from(message: inference_pb2.Queued) -> Queued:
    return Queued(
        request_id=message.request_id,
        position=message.position,
        predicted_start_s=seconds(message.predicted_start),
        predicted_ttft_s=seconds(message.predicted_time_to_first_token),
        reason=message.reason,
        index=message.index,
    )


def _accepted_from(message: inference_pb2.Accepted) -> Accepted:
    def predicted(name: str) -> float | None:
        return seconds(getattr(message, name)) if message.HasField(name) else None

    return Accepted(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt_tokens=message.prompt_tokens,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        reason=message.reason,
        predicted_ttft_s=predicted("predicted_time_to_first_token"),
        predicted_tpot_s=predicted("predicted_time_per_output_token"),
        index=message.index,
    )


def _delta_from(message: inference_pb2.Delta) -> TextDelta:
    return TextDelta(
        text=message.text,
        tokens=tuple(message.token_ids),
        first_position=message.first_position,
        logprobs=tuple(map(_logprobs_from, message.logprobs)),
        prompt_logprobs=tuple(map(_logprobs_from, message.prompt_logprobs)),
        index=message.index,
    )


def _logprobs_from(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.chosen, tuple((top.token_id, top.logprob) for top in message.top))


def _completed_from(message: inference_pb2.Completed) -> Completed:
    return Completed(
        finish=FINISH_FROM[message.finish_reason],
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        cached_tokens=message.usage.cached_prompt_tokens,
        attempts=message.attempts,
        ledger=ledger_from(message.ledger),
        transfers=tuple(_transfer_from(report) for report in message.transfers),
        answers=tuple(map(_answer_end_from, message.answers)),
        decode_workers=tuple(message.decode_workers),
    )


def _answer_end_from(message: inference_pb2.AnswerEnd) -> AnswerEnd:
    return AnswerEnd(
        finish=FINISH_FROM[message.finish_reason],
        completion_tokens=message.completion_tokens,
        attempts=message.attempts,
        ledger=ledger_from(message.ledger),
        mean_logprob=message.mean_logprob if message.HasField("mean_logprob") else None,
        decode_workers=tuple(message.decode_workers),
    )


def ledger_from(message: common_pb2.LatencyLedger) -> LatencyLedger:
    first, rest = (
        tuple((part.phase, part.duration.ToNanoseconds()) for part in parts) for parts in (message.first, message.rest)
    )
    return LatencyLedger(first, rest, message.time_to_first_token.ToNanoseconds(), message.total.ToNanoseconds())


def _transfer_from(message: common_pb2.TransferReport) -> TransferReport:
    return TransferReport(
        lease=message.lease,
        transport=message.transport,
        path=message.path,
        num_blocks=message.blocks,
        num_bytes=message.bytes,
        num_reads=message.reads,
        num_descriptors=message.descriptors,
        reused_blocks=message.reused_blocks,
        digests_verified=message.digests_verified,
        busy_s=seconds(message.busy),
        digest_s=seconds(message.digest_time),
        elapsed_s=seconds(message.elapsed),
    )


def _wrong(field: str, value: object, error: Exception) -> DiptychError:
    return DiptychError("INVALID_ARGUMENT", f"{field}: cannot be {value!r} ({error})", field=field)
