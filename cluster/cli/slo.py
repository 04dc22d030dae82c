"""How kept promises and predictions look on a terminal, and as JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.cli.screen import plain_table
from diptych.slo import Calibration, Errors, Kept, SLOAttainment

if TYPE_CHECKING:
    from rich.table import Table


def promises_table(standing: SLOAttainment) -> "Table":
    """One row for each SLO class. Errors are of predictions: above 0 % it took longer."""
    from rich.markup import escape

    kept = [">TTFT kept", ">TPOT kept", ">both kept"]
    table = plain_table("class", ">requests", *kept, ">TTFT error p10 / p50 / p90", ">TPOT error p10 / p50 / p90")
    for score in standing.classes:
        shares = map(_kept, (score.ttft, score.tpot, score.both))
        errors = map(_errors, (score.ttft_errors, score.tpot_errors))
        table.add_row(escape(score.name), str(score.requests), *shares, *errors)
    return table


def calibration_line(told: Calibration) -> str:
    """How well the lengths of answers were predicted."""
    within = f"{told.within_p50:.0%} within the predicted p50, {told.within_p90:.0%} within p90"
    error = f"mean error {told.error_tokens:.0f} tokens ({told.asked_error_tokens:.0f} when taken as long as allowed)"
    return f"answer lengths: {told.answers} scored, {within}, {told.bucket_share:.0%} in the bucket, {error}"


def refusals_line(standing: SLOAttainment) -> str:
    """Why requests were turned away; empty when none was."""
    told = ", ".join(f"{count} {reason}" for reason, count in standing.refused if count)
    return f"turned away: {told}" if told else ""


def standing_json(standing: SLOAttainment) -> dict[str, Any]:
    return {
        "classes": [asdict(score) for score in standing.classes],
        "outcomes": dict(standing.outcomes),
        "refused": dict(standing.refused),
        "lengths": asdict(standing.calibration),
    }


def _kept(kept: Kept) -> str:
    return "" if kept.share is None else f"{kept.share:.1%} of {kept.settled}"


def _errors(errors: Errors | None) -> str:
    return "" if errors is None else f"{errors.p10:+.0%} / {errors.p50:+.0%} / {errors.p90:+.0%}"
