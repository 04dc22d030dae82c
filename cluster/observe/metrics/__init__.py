"""The Prometheus metrics of one gateway, as text. Knows the names of metrics; counts nothing, serves no port."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.observe.metrics.families import Counts, Rows
from cluster.observe.metrics.requests import request_families
from cluster.observe.metrics.responses import response_families
from cluster.observe.metrics.slo_metrics import slo_families
from cluster.observe.metrics.supervision import supervision_families
from cluster.observe.metrics.vllm import vllm_families
from cluster.observe.metrics.workers import worker_families
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
    """The text that Prometheus scrapes. Every metric has the label `gateway`, except those that `compat` adds.

    `decisions`: of the elastic policy, as (kind, outcome, count); None: there is no policy, or the controller is away.
    `active`: number of running answers. `responses`: counts by server, method and code.
    """

    def families() -> Iterator[Metric]:
        yield from slo_families(attainment, gateway, decisions)
        yield from request_families(attainment, gateway, view, active)
        yield from supervision_families(gateway, view)
        yield from worker_families(gateway, view)
        yield from response_families(gateway, responses)
        if compat == "vllm":
            yield from vllm_families(attainment, gateway, view)

    registry = CollectorRegistry()  # one per scrape, so that nothing is global
    registry.register(_Collector(families()))
    return generate_latest(registry).decode()


class _Collector(Collector):
    """Yields these families, once."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
