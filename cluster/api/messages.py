"""Our types to protobuf and back. Pure: no call, no clock, no text.

`..._message` makes a message, `..._from` reads one. Bad input is `InvalidRequest` naming the message's field.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.duration_pb2 import Duration

from cluster.events import Accepted, AnswerEnd, Completed, Queued
from cluster.ledger import LatencyLedger
from cluster.text import ChatPrompt, GenerationInput, TextDelta, TextEvent, TextPrompt, TokenPrompt
from diptych.v1 import common_pb2, inference_pb2
from kvtransfer.ticket import TransferReport
from workers.errors import InvalidRequest
from workers.request import SLO, FinishReason, SamplingParams, TokenLogprobs

FINISH = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
FINISH_FROM = {value: reason for reason, value in FINISH.items()}
LONGEST_CLASS = 64
# Fields of Sampling that are one value, in our types of the same name.
SCALARS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "n", "best_of"),
    *("include_stop_in_output", "skip_special_tokens"),
)


class SamplingOptions(TypedDict, total=False):
    """What a caller may say about sampling; what is left out is the server's choice. See `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    n: int
    best_of: int
    include_stop_in_output: bool
    skip_special_tokens: bool


def duration(ns: int) -> Duration:
    message = Duration()
    message.FromNanoseconds(ns)
    return message


def duration_of(seconds: float) -> Duration:
    return duration(round(seconds * 1e9))


def seconds(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9


def prompt_from(request: inference_pb2.GenerateRequest) -> GenerationInput:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "tokens":
            return TokenPrompt(tuple(request.tokens.ids))
        case "chat":
            messages = tuple((each.role, each.content) for each in request.chat.messages)
            return ChatPrompt(messages, tuple(request.chat.tools))
        case _:
            raise InvalidRequest("prompt", "is missing; give one of text, tokens or chat")


def sampling_from(message: inference_pb2.Sampling) -> SamplingParams:
    given = {name: getattr(message, name) for name in SCALARS if message.HasField(name)}
    return SamplingParams(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def sampling_message(options: SamplingOptions) -> inference_pb2.Sampling:
    """Raises `InvalidRequest` for a value that no field can hold."""
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
            raise InvalidRequest(f"sampling.{name}", f"cannot be {value!r} ({error})") from None
    return message


def slo_from(message: inference_pb2.Slo) -> SLO:
    def promise(name: str) -> float | None:
        if not message.HasField(name):
            return None
        wanted_s = seconds(getattr(message, name))
        if not wanted_s > 0.0:
            rule = "it must be above 0, or absent where nothing is wanted"
            raise InvalidRequest(f"slo.{name}", f"is {wanted_s:g} s; {rule}")
        return wanted_s

    name = checked_class(message.class_name or "default", "slo.class_name")
    return SLO(promise("time_to_first_token"), promise("time_per_output_token"), name)


def checked_class(name: str, field: str) -> str:
    """Raises `InvalidRequest` for what cannot name a class."""
    if len(name) > LONGEST_CLASS or not all(" " < letter <= "~" for letter in name):
        rule = f"must be at most {LONGEST_CLASS} visible ASCII characters"
        raise InvalidRequest(field, f"{name[:40]!r} cannot be used; it {rule}")
    return name


def slo_message(slo: SLO) -> inference_pb2.Slo:
    """Raises `InvalidRequest` for a value that no field can hold."""
    message = inference_pb2.Slo(class_name=slo.class_name)
    for name, wanted_s in (("time_to_first_token", slo.ttft_s), ("time_per_output_token", slo.tpot_s)):
        if wanted_s is not None:
            try:
                getattr(message, name).CopyFrom(duration_of(wanted_s))
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidRequest(f"slo.{name}", f"cannot be {wanted_s!r} ({error})") from None
    return message


def event_message(event: TextEvent) -> inference_pb2.GenerateResponse:
    match event:
        case Queued():
            return inference_pb2.GenerateResponse(queued=_queued_message(event))
        case Accepted():
            return inference_pb2.GenerateResponse(accepted=_accepted_message(event))
        case TextDelta():
            return inference_pb2.GenerateResponse(delta=delta_message(event))
        case Completed():
            return inference_pb2.GenerateResponse(completed=_completed_message(event))


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


def _queued_message(event: Queued) -> inference_pb2.Queued:
    return inference_pb2.Queued(
        request_id=event.request_id,
        position=event.position,
        predicted_start=duration_of(event.predicted_start_s),
        predicted_time_to_first_token=duration_of(event.predicted_ttft_s),
        reason=event.reason,
        index=event.index,
    )


def _queued_from(message: inference_pb2.Queued) -> Queued:
    return Queued(
        request_id=message.request_id,
        position=message.position,
        predicted_start_s=seconds(message.predicted_start),
        predicted_ttft_s=seconds(message.predicted_time_to_first_token),
        reason=message.reason,
        index=message.index,
    )


def _accepted_message(event: Accepted) -> inference_pb2.Accepted:
    return inference_pb2.Accepted(
        request_id=event.request_id,
        attempt=event.attempt,
        prompt_tokens=event.prompt_tokens,
        prefill_worker=event.prefill_worker,
        decode_worker=event.decode_worker,
        reason=event.reason,
        predicted_time_to_first_token=None if event.predicted_ttft_s is None else duration_of(event.predicted_ttft_s),
        predicted_time_per_output_token=None if event.predicted_tpot_s is None else duration_of(event.predicted_tpot_s),
        index=event.index,
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


def delta_message(delta: TextDelta) -> inference_pb2.Delta:
    return inference_pb2.Delta(
        text=delta.text,
        token_ids=delta.tokens,
        first_position=delta.first_position,
        logprobs=map(_logprobs_message, delta.logprobs),
        prompt_logprobs=map(_logprobs_message, delta.prompt_logprobs),
        index=delta.index,
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


def _logprobs_message(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return inference_pb2.TokenLogprobs(chosen=logprobs.chosen, top=top)


def _logprobs_from(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.chosen, tuple((top.token_id, top.logprob) for top in message.top))


def _completed_message(event: Completed) -> inference_pb2.Completed:
    return inference_pb2.Completed(
        finish_reason=FINISH[event.finish],
        usage=common_pb2.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_prompt_tokens=event.cached_tokens,
        ),
        attempts=event.attempts,
        ledger=ledger_message(event.ledger),
        transfers=[_transfer_message(report) for report in event.transfers],
        answers=map(_answer_end_message, event.answers),
        decode_workers=event.decode_workers,
    )


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


def _answer_end_message(end: AnswerEnd) -> inference_pb2.AnswerEnd:
    return inference_pb2.AnswerEnd(
        finish_reason=FINISH[end.finish],
        completion_tokens=end.completion_tokens,
        attempts=end.attempts,
        ledger=ledger_message(end.ledger),
        mean_logprob=end.mean_logprob,
        decode_workers=end.decode_workers,
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


def ledger_message(ledger: LatencyLedger) -> common_pb2.LatencyLedger:
    def parts(named: tuple[tuple[str, int], ...]) -> list[common_pb2.LedgerPart]:
        return [common_pb2.LedgerPart(phase=phase, duration=duration(ns)) for phase, ns in named]

    return common_pb2.LatencyLedger(
        first=parts(ledger.first),
        rest=parts(ledger.rest),
        time_to_first_token=duration(ledger.ttft_ns),
        total=duration(ledger.total_ns),
    )


def ledger_from(message: common_pb2.LatencyLedger) -> LatencyLedger:
    first, rest = (
        tuple((part.phase, part.duration.ToNanoseconds()) for part in parts) for parts in (message.first, message.rest)
    )
    return LatencyLedger(first, rest, message.time_to_first_token.ToNanoseconds(), message.total.ToNanoseconds())


def _transfer_message(report: TransferReport) -> common_pb2.TransferReport:
    return common_pb2.TransferReport(
        lease=report.lease,
        transport=report.transport,
        path=report.path,
        blocks=report.num_blocks,
        bytes=report.num_bytes,
        reads=report.num_reads,
        descriptors=report.num_descriptors,
        reused_blocks=report.reused_blocks,
        digests_verified=report.digests_verified,
        busy=duration_of(report.busy_s),
        digest_time=duration_of(report.digest_s),
        elapsed=duration_of(report.elapsed_s),
    )


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
