"""Prints pools and scaling decisions on a terminal or as JSON."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.cli.screen import plain_table
from diptych.view import ClusterView, Decision, DecisionRecord, WorkerState

if TYPE_CHECKING:
    from rich.table import Table


def pools_table(view: ClusterView) -> "Table":
    """Only elastic pools have a minimum and a maximum."""
    table = plain_table("pool", "role", ">ready", ">target", ">min", ">max")
    for pool in view.pools:
        workers = (worker for worker in view.workers if worker.pool == pool.name)
        ready = sum(worker.state is WorkerState.READY for worker in workers)
        bounds = (pool.min_replicas, pool.max_replicas) if pool.min_replicas < pool.max_replicas else ("-", "-")
        table.add_row(pool.name, pool.role.value, *map(str, (ready, pool.wanted, *bounds)))
    return table


def decisions_table(decisions: Iterable[DecisionRecord]) -> "Table":
    """The latest first."""
    from rich.markup import escape

    table = plain_table(">age", "decision", "outcome", "reason")
    for taken in reversed(tuple(decisions)):
        words = decision_words(taken.decision), taken.outcome, taken.decision.reason
        table.add_row(f"{taken.age_s:.0f} s", *map(escape, words))
    return table


def decision_words(decision: Decision) -> str:
    if decision.kind == "flip":
        return f"{decision.worker} -> {decision.role.value if decision.role else '?'}"
    return f"grow {decision.pool}" if decision.kind == "grow" else f"shrink {decision.pool}: {decision.worker}"


def decision_json(taken: DecisionRecord) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(taken.decision)
    return built | {"age_s": taken.age_s, "outcome": taken.outcome}
