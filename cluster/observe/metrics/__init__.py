"""What Prometheus reads of one gateway. Knows the names of metrics; counts nothing itself, serves no port.

The registry is made for each reading and has one collector: nothing is global.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import Counts, Rows
from cluster.observe.metrics.requests import request_families
from cluster.observe.metrics.responses import response_families
from cluster.observe.metrics.slo import standing_families
from cluster.observe.metrics.supervision import supervision_families
from cluster.observe.metrics.vllm import vllm_families
from cluster.observe.metrics.workers import worker_families
from cluster.policy.slo_attainment import GatewayAttainment
from diptych.view import ClusterView

NOBODY = ClusterView(0, "", None, ())


def exposition(
    standing: GatewayAttainment,
    gateway: str,
    view: ClusterView = NOBODY,
    decisions: Counts | None = None,
    *,
    active: int = 0,
    compat: str | None = None,
    responses: Rows = (),
) -> str:
    """The text that Prometheus reads. Every metric has the label `gateway`, but for those that `compat` adds.

    `decisions` of the elastic policy: kind, outcome, and how many; None: there is no policy, or it cannot be asked.
    `active` are the answers under way, `responses` those of the doors, by door, method and code.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(_families(standing, gateway, view, decisions, active, compat, responses)))
    return generate_latest(registry).decode()


def _families(
    standing: GatewayAttainment,
    gateway: str,
    view: ClusterView,
    decisions: Counts | None,
    active: int,
    compat: str | None,
    responses: Rows,
) -> Iterator[Metric]:
    yield from standing_families(standing, gateway, decisions)
    yield from request_families(standing, gateway, view, active)
    yield from supervision_families(gateway, view)
    yield from worker_families(gateway, view)
    yield from response_families(gateway, responses)
    if compat == "vllm":
        yield from vllm_families(standing, gateway, view)


class _Collector:
    """Tells these families, once."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
