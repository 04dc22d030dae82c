"""Dashboard and rules of the chart: PromQL that promtool accepts, panels that Grafana can place, alerts that fire."""

import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from tests.observe.metrics.boards import BOARD, FILES, GROUPS, RULES, names, panels, queries, rules
from tests.observe.metrics.prometheus import promtool

sys.path.insert(0, str(FILES.parents[1]))
from dashboard import dashboard_json

ALERTS = Path(__file__).resolve().parents[2] / "data" / "monitoring" / "alerts.yaml"
UNITS = {"s", "short", "none", "percentunit", "reqps", "ops", "Bps", "bytes"}  # of Grafana's


def test_the_dashboard_is_up_to_date() -> None:
    assert (FILES / "dashboard.json").read_text() == dashboard_json(), "run: python helm/dashboard.py"


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["y"] >= 0 and place["w"] > 0 and place["h"] > 0
        assert place["x"] + place["w"] <= 24, panel["title"]
    for one, other in combinations(BOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one['title']} lies over {other['title']}"


def test_panels_are_valid_for_grafana() -> None:
    assert BOARD["schemaVersion"] >= 36 and BOARD["uid"] and BOARD["title"]
    assert not BOARD.get("id"), "Grafana gives the number"
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    for panel in panels():
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters), panel["title"]
        assert panel["type"] in ("timeseries", "stat") and panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        used = set(re.findall(r"\$\{?(\w+)", str(panel)))
        assert used <= variables | {"__rate_interval"}, panel["title"]


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_promtool_accepts_every_dashboard_query(tmp_path: Path) -> None:
    found = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(queries().values())]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": found}]}))
    assert f"SUCCESS: {len(found)} rules found" in promtool("check", "rules", path)


def test_promtool_would_notice_a_wrong_query(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    wrong = [{"record": "wrong:one", "expr": "sum by (class (rate(diptych_requests_total[5m]))"}]
    path.write_text(yaml.safe_dump({"groups": [{"name": "wrong", "rules": wrong}]}))
    with pytest.raises(AssertionError, match="could not parse expression"):
        promtool("check", "rules", path)


def test_promtool_accepts_the_rules() -> None:
    assert f"SUCCESS: {len(rules())} rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", ALERTS)


def test_every_alert_has_a_test_and_advice() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    tried = {
        each["alertname"] for test in yaml.safe_load(ALERTS.read_text())["tests"] for each in test["alert_rule_test"]
    }
    assert set(alerts) == tried
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)


def test_every_recorded_series_in_use_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = set().union(*(names(rule["expr"]) for rule in rules()))
    assert {name for name in asked if ":" in name} <= recorded
