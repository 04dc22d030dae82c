"""The KEDA query of docs/kubernetes.md: promtool accepts it, and its series exists."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.policy.slo_attainment import GatewayAttainment
from cluster.spec import Role
from diptych.view import ClusterView, PoolView
from tests.observe.exposition import exposition
from tests.observe.metrics.boards import names
from tests.observe.metrics.prometheus import promtool

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kubernetes.md"
SERIES = "diptych_pool_target_workers"


@pytest.fixture
def scaled() -> dict[str, Any]:
    fences = re.findall(r"^```\w*\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (found,) = [yaml.safe_load(body) for body in fences if "kind: ScaledObject" in body]
    spec: dict[str, Any] = found["spec"]
    return spec


def query(scaled: dict[str, Any]) -> str:
    (trigger,) = scaled["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    assert all(isinstance(each, str) for each in trigger["metadata"].values()), "KEDA takes words only"
    assert float(trigger["metadata"]["threshold"]) == 1
    expression: str = trigger["metadata"]["query"]
    return expression


def test_promtool_accepts_the_query(scaled: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "query.yaml"
    rules = [{"record": "keda:query", "expr": query(scaled)}]
    path.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    assert "SUCCESS: 1 rules found" in promtool("check", "rules", path)


def test_the_query_returns_the_target_number_of_workers(scaled: dict[str, Any], tmp_path: Path) -> None:
    """Of several gateways, and of no other pool or release."""
    rules, test = tmp_path / "rules.yaml", tmp_path / "test.yaml"
    rules.write_text(yaml.safe_dump({"groups": []}))
    received = {("llm-diptych", "decode", "a"): 3, ("llm-diptych", "decode", "b"): 3}
    received |= {("llm-diptych", "prefill", "a"): 7, ("other-diptych", "decode", "c"): 9}
    series = [
        {"series": f'{SERIES}{{namespace="default",job="{job}",pool="{pool}",gateway="{gateway}"}}', "values": f"{n}x2"}
        for (job, pool, gateway), n in received.items()
    ]
    asked = {"expr": query(scaled), "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": 3}]}
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]
    test.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", test)


def test_a_gateway_exports_the_series_with_these_labels(scaled: dict[str, Any]) -> None:
    assert names(query(scaled)) & {SERIES} == {SERIES}
    view = ClusterView(1, "c", None, (), pools=(PoolView("decode", Role.DECODE, 3, 1, 4),))
    assert f'{SERIES}{{gateway="gateway-0",pool="decode"}} 3.0' in exposition(GatewayAttainment(), "gateway-0", view)


def test_the_scaled_object_targets_the_charts_stateful_set(scaled: dict[str, Any]) -> None:
    target = scaled["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == ("apps/v1", "StatefulSet")
    assert target["name"] == "llm-diptych-decode" and 'pool="decode"' in query(scaled)
    assert scaled["triggers"][0]["metadata"]["ignoreNullValues"] == "false"
