"""`diptych status`: a snapshot of a running cluster."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.options import JSON, GroupedCommand, client_options, seconds
from cluster.cli.screen import (
    console,
    decision_json,
    decisions_table,
    links_table,
    models_text,
    named_class,
    plain_table,
    pools_table,
    print_json,
    problem_lines,
    view_json,
    workers_table,
)
from cluster.cli.tiers import has_loans, has_tiers, loans_table, tier_problems, tiers_table
from diptych.access import Access
from diptych.slo import Calibration, Errors, SLOAttainment, SLOCount

if TYPE_CHECKING:
    from rich.table import Table

    from diptych.view import ClusterView


@click.command(cls=GroupedCommand)
@client_options
@seconds("--wait", "Wait this long for the cluster to be ready.", least=0.0)
@click.option("--audit", is_flag=True, help="Have every worker check that all its KV blocks are accounted for.")
@JSON
@click.option("--metrics", is_flag=True, help="Print the gateway's metrics in Prometheus format instead.")
def status(endpoint: str, access: Access, wait_s: float | None, audit: bool, as_json: bool, metrics: bool) -> None:
    """Show workers, their load, pools, links and SLO attainment.

    \b
    Example:
      diptych status --endpoint 127.0.0.1:50051 --wait 60
      diptych status --metrics
      diptych status --endpoint grpcs://llm.example.com:443 --key-file ~/.diptych-key
    """
    from diptych.client import Client

    with Client(endpoint, access=access) as client:
        if wait_s is not None:
            client.wait_ready(wait_s)
        if metrics:
            return click.echo(client.metrics(), nl=False)
        found = client.status(audit=audit)
    view, attainment = found.view, found.slo_attainment
    if as_json:
        gateway = {
            "name": found.gateway,
            "active": found.active_requests,
            "max_requests": found.max_requests,
            "queued": attainment.queued,
        }
        decisions = [decision_json(record) for record in found.decisions]
        print_json(
            view_json(view)
            | {"gateway": gateway, "decisions": decisions, "slo_attainment": attainment_json(attainment)}
        )
        _exit_unless_clean(view, audit)
        return
    screen = console()
    load = f"{found.active_requests} of at most {found.max_requests} requests, {attainment.queued} of them queued"
    named = f"cluster {view.name}, revision {view.revision}, {models_text(view)}"
    screen.print(f"{named}, {found.gateway}: {load}", markup=False)
    for table in _tables(view):
        screen.print(table)
    for line in (*problem_lines(view), *tier_problems(view)):
        screen.print(line, markup=False)
    if view.links:
        screen.print(links_table(view))
    if found.decisions:
        screen.print(decisions_table(found.decisions))
    if attainment.classes:
        screen.print(attainment_table(attainment))
    if refusals := refusals_line(attainment):
        screen.print(refusals, markup=False)
    if attainment.calibration.answers:
        screen.print(calibration_line(attainment.calibration), markup=False)
    for worker in view.workers if audit else ():
        screen.print(f"audit of {worker.name}: {worker.audit}", markup=False)
    _exit_unless_clean(view, audit)


def _tables(view: "ClusterView") -> "Iterator[Table]":
    yield workers_table(view)
    if view.pools:
        yield pools_table(view)
    if has_tiers(view):
        yield tiers_table(view)
    if has_loans(view):
        yield loans_table(view)


def _exit_unless_clean(view: "ClusterView", audit: bool) -> None:
    unclean = [worker.name for worker in view.workers if audit and worker.audit != "clean"]
    if unclean:
        raise click.ClickException(f"the audit did not pass at {', '.join(unclean)}")


def attainment_table(attainment: SLOAttainment) -> "Table":
    """One row per SLO class. Prediction errors are positive if a request was slower than predicted."""
    from rich.markup import escape

    shares = [">TTFT attainment", ">TPOT attainment", ">SLO attainment"]
    table = plain_table("class", ">requests", *shares, ">TTFT error p10 / p50 / p90", ">TPOT error p10 / p50 / p90")
    for score in attainment.classes:
        attained = map(_share, (score.ttft, score.tpot, score.both))
        errors = map(_errors, (score.ttft_errors, score.tpot_errors))
        table.add_row(escape(named_class(score)), str(score.requests), *attained, *errors)
    return table


def calibration_line(found: Calibration) -> str:
    """The accuracy of predicted output lengths."""
    within = f"{found.within_p50:.0%} within the predicted p50, {found.within_p90:.0%} within p90"
    error = f"mean error {found.error_tokens:.0f} tokens ({found.asked_error_tokens:.0f} when taken as max_tokens)"
    return f"output lengths: {found.answers} scored, {within}, {error}"


def refusals_line(attainment: SLOAttainment) -> str:
    """Counts of refused requests by reason; empty if there are none."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in attainment.refused if count)
    return f"rejected: {reasons}" if reasons else ""


def attainment_json(attainment: SLOAttainment) -> dict[str, Any]:
    return {
        "classes": [asdict(score) for score in attainment.classes],
        "outcomes": dict(attainment.outcomes),
        "refused": dict(attainment.refused),
        "lengths": asdict(attainment.calibration),
    }


def _share(count: SLOCount) -> str:
    return "" if count.share is None else f"{count.share:.1%} of {count.settled}"


def _errors(errors: Errors | None) -> str:
    return "" if errors is None else f"{errors.p10:+.0%} / {errors.p50:+.0%} / {errors.p90:+.0%}"
