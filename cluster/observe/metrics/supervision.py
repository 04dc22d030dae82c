"""Metrics of supervision: gateways that hang or die, background tasks that fail."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from cluster.observe.metrics.families import counter, gauge
from diptych.view import ClusterView, GatewayState

PROCESSES = ("server", "controller", "gateway")


def supervision_families(gateway: str, view: ClusterView) -> Iterator[Metric]:
    first, served = (gateway,), view.served_gateways
    states = Counter(each.state for each in served)
    by_state = (((gateway, state.value), states[state]) for state in GatewayState)
    yield gauge("diptych_gateways", "Gateways that the server started, by state.", ("gateway", "state"), by_state)
    for name, text, count in (
        ("restarts", "How often gateways died or were replaced.", sum(each.restarts for each in served)),
        ("unresponsive", "How often gateways did not answer in time.", sum(each.silences for each in served)),
    ):
        yield counter(f"diptych_gateway_{name}", text, ("gateway",), [(first, count)])
    failed = Counter[str]()
    for each in view.failures:
        failed["gateway" if each.process == gateway else each.process] += each.count
    text = "Exceptions in background tasks; the tasks continue."
    failures = (((gateway, process), failed[process]) for process in PROCESSES)
    yield counter("diptych_background_failures", text, ("gateway", "process"), failures)
