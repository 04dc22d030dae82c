"""The Prometheus metrics of one gateway, as text. Knows the names of metrics; counts nothing, serves no port."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.observe.metrics.families import Counts, Rows
from cluster.observe.metrics.gateway import (
    decision_families,
    request_families,
    response_families,
    slo_families,
    supervision_families,
)
from cluster.observe.metrics.vllm import vllm_families
from cluster.observe.metrics.workers import worker_families
from cluster.policy.slo_attainment import GatewayAttainment
from diptych.view import ClusterView


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """What the dispatcher of one model tells. `view`: of its workers. `active`: number of running answers."""

    attainment: GatewayAttainment
    view: ClusterView
    active: int = 0


def exposition_of(
    parts: Sequence[ModelMetrics],
    gateway: str,
    view: ClusterView,
    decisions: Counts | None = None,
    compat: str | None = None,
    responses: Rows = (),
) -> str:
    """The text that Prometheus scrapes. Every metric has the label `gateway`, except those that `compat` adds.

    `parts`: by model; of several, requests, pools and workers have the label `model`. `view`: of all. `decisions`: of
    the elastic policy, as (kind, outcome, count); None: there is no policy, or the controller is away. `responses`:
    counts by server, method and code.
    """

    def each(families_of: Callable[[ModelMetrics], Iterator[Metric]]) -> Iterable[Metric]:
        if len(parts) == 1:
            return families_of(parts[0])
        return _by_model((part.view.model.name, families_of(part)) for part in parts if part.view.model)

    def families() -> Iterator[Metric]:
        yield from each(lambda part: slo_families(part.attainment, gateway))
        yield from decision_families(gateway, decisions)
        yield from each(lambda part: request_families(part.attainment, gateway, part.view, part.active))
        yield from supervision_families(gateway, view)
        yield from each(lambda part: worker_families(gateway, part.view))
        yield from response_families(gateway, responses)
        if compat == "vllm":
            yield from each(lambda part: vllm_families(part.attainment, gateway, part.view))

    registry = CollectorRegistry()  # one per scrape, so that nothing is global
    registry.register(_Collector(families()))
    return generate_latest(registry).decode()


def _by_model(parts: Iterable[tuple[str, Iterable[Metric]]]) -> Iterable[Metric]:
    """The families of all models; their samples have the label `model`, unless they are vLLM's with `model_name`."""
    found: dict[str, Metric] = {}
    for model, families in parts:
        for family in families:
            samples = [
                each if "model_name" in each.labels else each._replace(labels={**each.labels, "model": model})
                for each in family.samples
            ]
            known = found.setdefault(family.name, family)
            known.samples = samples if known is family else known.samples + samples
    return found.values()


class _Collector(Collector):
    """Yields these families, once."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
