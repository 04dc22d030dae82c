"""SLO attainment and predictions on a terminal and as JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.cli.screen import plain_table
from diptych.slo import Calibration, Errors, Kept, SLOAttainment

if TYPE_CHECKING:
    from rich.table import Table


def attainment_table(standing: SLOAttainment) -> "Table":
    """One row for each SLO class. Errors are of predictions: above 0 % means slower than predicted."""
    from rich.markup import escape

    shares = [">TTFT attainment", ">TPOT attainment", ">SLO attainment"]
    table = plain_table("class", ">requests", *shares, ">TTFT error p10 / p50 / p90", ">TPOT error p10 / p50 / p90")
    for score in standing.classes:
        attained = map(_share, (score.ttft, score.tpot, score.both))
        errors = map(_errors, (score.ttft_errors, score.tpot_errors))
        table.add_row(escape(score.name), str(score.requests), *attained, *errors)
    return table


def calibration_line(found: Calibration) -> str:
    """How well output lengths were predicted."""
    within = f"{found.within_p50:.0%} within the predicted p50, {found.within_p90:.0%} within p90"
    error = f"mean error {found.error_tokens:.0f} tokens ({found.asked_error_tokens:.0f} when taken as max_tokens)"
    return f"output lengths: {found.answers} scored, {within}, {found.bucket_share:.0%} in the bucket, {error}"


def refusals_line(standing: SLOAttainment) -> str:
    """Why requests were rejected; empty when none was."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in standing.refused if count)
    return f"rejected: {reasons}" if reasons else ""


def standing_json(standing: SLOAttainment) -> dict[str, Any]:
    return {
        "classes": [asdict(score) for score in standing.classes],
        "outcomes": dict(standing.outcomes),
        "refused": dict(standing.refused),
        "lengths": asdict(standing.calibration),
    }


def _share(kept: Kept) -> str:
    return "" if kept.share is None else f"{kept.share:.1%} of {kept.settled}"


def _errors(errors: Errors | None) -> str:
    return "" if errors is None else f"{errors.p10:+.0%} / {errors.p50:+.0%} / {errors.p90:+.0%}"
