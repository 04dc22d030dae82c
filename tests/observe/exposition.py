"""What Prometheus scrapes from a gateway of one model."""

from cluster.observe.metrics import ModelMetrics, exposition_of
from cluster.observe.metrics.families import Counts, Rows
from cluster.policy.slo_attainment import GatewayAttainment
from diptych.view import ClusterView

EMPTY = ClusterView(0, "", None, ())


def exposition(
    attainment: GatewayAttainment,
    gateway: str,
    view: ClusterView = EMPTY,
    decisions: Counts | None = None,
    *,
    active: int = 0,
    compat: str | None = None,
    responses: Rows = (),
) -> str:
    return exposition_of([ModelMetrics(attainment, view, active)], gateway, view, decisions, compat, responses)
