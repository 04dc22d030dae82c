"""Requests from messages, and the events of an answer to messages: the server's side of the wire. Pure.

Bad input is `InvalidRequest` naming the message's field. The client's side is `diptych.messages`.
"""

from collections.abc import Mapping
from typing import Any

from cluster.frontend.text import ChatPrompt, TextPrompt, TokenPrompt, Unencoded
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
from diptych.options import SLO
from diptych.v1 import common_pb2, inference_pb2
from diptych.wire import FINISH, duration, duration_of, seconds
from workers.errors import InvalidRequest
from workers.request import SamplingParams

LONGEST_CLASS = 64
NOTHING: Mapping[str, Any] = {}
# Fields of Sampling that are one value, in our types of the same name.
SCALARS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "n", "best_of"),
    *("include_stop_in_output", "skip_special_tokens"),
)


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
    """`defaults` stand for what is not said."""
    given = {name: getattr(message, name) for name in SCALARS if message.HasField(name)}
    return SamplingParams(
        **{**defaults, **given},
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


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


def _queued_message(event: Queued) -> inference_pb2.Queued:
    return inference_pb2.Queued(
        request_id=event.request_id,
        position=event.position,
        predicted_start=duration_of(event.predicted_start_s),
        predicted_time_to_first_token=duration_of(event.predicted_ttft_s),
        reason=event.reason,
        index=event.index,
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


def delta_message(delta: TextDelta) -> inference_pb2.Delta:
    return inference_pb2.Delta(
        text=delta.text,
        token_ids=delta.tokens,
        first_position=delta.first_position,
        logprobs=map(_logprobs_message, delta.logprobs),
        prompt_logprobs=map(_logprobs_message, delta.prompt_logprobs),
        index=delta.index,
    )


def _logprobs_message(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return inference_pb2.TokenLogprobs(chosen=logprobs.chosen, top=top)


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


def _answer_end_message(end: AnswerEnd) -> inference_pb2.AnswerEnd:
    return inference_pb2.AnswerEnd(
        finish_reason=FINISH[end.finish],
        completion_tokens=end.completion_tokens,
        attempts=end.attempts,
        ledger=ledger_message(end.ledger),
        mean_logprob=end.mean_logprob,
        decode_workers=end.decode_workers,
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
