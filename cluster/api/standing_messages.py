"""How a gateway has kept its promises, to protobuf and back. Pure. The histograms of errors travel as metrics only."""

from collections.abc import Iterable

from cluster.policy.lengths import Calibration
from cluster.policy.promises import ClassScore, Errors, Kept, Standing
from diptych.v1 import admin_pb2

Counts = tuple[tuple[str, int], ...]


def standing_message(standing: Standing) -> admin_pb2.Standing:
    told = standing.calibration
    return admin_pb2.Standing(
        classes=map(_class_message, standing.classes),
        outcomes=_counts_message(standing.outcomes),
        refused=_counts_message(standing.refused),
        lengths=admin_pb2.Calibration(
            answers=told.answers,
            within_p50=told.within_p50,
            within_p90=told.within_p90,
            bucket_share=told.bucket_share,
            error_tokens=told.error_tokens,
            asked_error_tokens=told.asked_error_tokens,
        ),
        queued=standing.queued,
    )


def standing_from(message: admin_pb2.Standing) -> Standing:
    told = message.lengths
    return Standing(
        classes=tuple(map(_class_from, message.classes)),
        outcomes=_counts_from(message.outcomes),
        refused=_counts_from(message.refused),
        calibration=Calibration(
            told.answers,
            told.within_p50,
            told.within_p90,
            told.bucket_share,
            told.error_tokens,
            told.asked_error_tokens,
        ),
        queued=message.queued,
    )


def _class_message(score: ClassScore) -> admin_pb2.ClassScore:
    return admin_pb2.ClassScore(
        name=score.name,
        requests=score.requests,
        time_to_first_token=_kept_message(score.ttft),
        time_per_output_token=_kept_message(score.tpot),
        both=_kept_message(score.both),
        first_token_errors=_errors_message(score.ttft_errors),
        output_token_errors=_errors_message(score.tpot_errors),
    )


def _class_from(message: admin_pb2.ClassScore) -> ClassScore:
    def errors(name: str) -> Errors | None:
        found: admin_pb2.Errors = getattr(message, name)
        return Errors(found.p10, found.p50, found.p90) if message.HasField(name) else None

    return ClassScore(
        name=message.name,
        requests=message.requests,
        ttft=_kept_from(message.time_to_first_token),
        tpot=_kept_from(message.time_per_output_token),
        both=_kept_from(message.both),
        ttft_errors=errors("first_token_errors"),
        tpot_errors=errors("output_token_errors"),
    )


def _kept_message(kept: Kept) -> admin_pb2.Kept:
    return admin_pb2.Kept(settled=kept.settled, kept=kept.kept)


def _kept_from(message: admin_pb2.Kept) -> Kept:
    return Kept(message.settled, message.kept)


def _errors_message(errors: Errors | None) -> admin_pb2.Errors | None:
    return None if errors is None else admin_pb2.Errors(p10=errors.p10, p50=errors.p50, p90=errors.p90)


def _counts_message(counts: Counts) -> list[admin_pb2.Count]:
    return [admin_pb2.Count(name=name, count=count) for name, count in counts]


def _counts_from(messages: Iterable[admin_pb2.Count]) -> Counts:
    return tuple((message.name, message.count) for message in messages)
