"""How a gateway has kept its promises, to protobuf. Pure. The histograms of errors travel as metrics only."""

from diptych.slo import ClassScore, Errors, Kept, SLOAttainment
from diptych.v1 import admin_pb2

Counts = tuple[tuple[str, int], ...]


def standing_message(standing: SLOAttainment) -> admin_pb2.Standing:
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


def _kept_message(kept: Kept) -> admin_pb2.Kept:
    return admin_pb2.Kept(settled=kept.settled, kept=kept.kept)


def _errors_message(errors: Errors | None) -> admin_pb2.Errors | None:
    return None if errors is None else admin_pb2.Errors(p10=errors.p10, p50=errors.p50, p90=errors.p90)


def _counts_message(counts: Counts) -> list[admin_pb2.Count]:
    return [admin_pb2.Count(name=name, count=count) for name, count in counts]
