"""The chart's README, schema and values say the same, and the same as the code."""

import json
import sys
from typing import Any

import pytest
import yaml

from cluster.spec import (
    ClassSpec,
    ClusterSpec,
    ElasticSpec,
    GatewaySpec,
    HealthSpec,
    LogSpec,
    MetricsSpec,
    PoolSpec,
    Resources,
)
from cluster.spec_file import keys_of
from diptych.wire import ADMIN
from tests.cli.commands import command_of
from tests.helm.chart import CHART
from workers.config import EngineConfig, ParallelConfig, TransferConfig
from workers.costs import LinearCost
from workers.request import SLO

sys.path.insert(0, str(CHART.parent))
from table import table, with_table

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CLUSTER, POOL = SCHEMA["properties"]["cluster"], SCHEMA["definitions"]["pool"]
BLOCKS = [
    (ClusterSpec, CLUSTER),
    (TransferConfig, CLUSTER["properties"]["transfer"]),
    (GatewaySpec, CLUSTER["properties"]["gateway"]),
    (SLO, CLUSTER["properties"]["gateway"]["properties"]["slo"]),
    (ClassSpec, SCHEMA["definitions"]["class"]),
    (HealthSpec, CLUSTER["properties"]["health"]),
    (ElasticSpec, CLUSTER["properties"]["elastic"]),
    (MetricsSpec, CLUSTER["properties"]["metrics"]),
    (LogSpec, CLUSTER["properties"]["logs"]),
    (PoolSpec, POOL),
    (ParallelConfig, POOL["properties"]["parallel"]),
    (Resources, POOL["properties"]["resources"]),
    (LinearCost, POOL["properties"]["cost"]),
    (EngineConfig, SCHEMA["definitions"]["engine"]),
]


def test_the_table_of_values_is_up_to_date() -> None:
    page, values = (CHART / "README.md").read_text(), (CHART / "values.yaml").read_text()
    assert page == with_table(page, values), "run: python helm/table.py"


def test_the_table_has_a_row_for_every_key() -> None:
    text = "# Words\na: 1\nb:\n  # More\n  # words\n  c: {d: 2}\n  e:\n    - 1\n    - 2\n"
    rows = table(text).splitlines()[2:]
    assert rows == ["| `a` | `1` | Words |", "| `b.c` | `{d: 2}` | More words |", "| `b.e` | `...` |  |"]


@pytest.mark.parametrize(("kind", "schema"), BLOCKS, ids=lambda each: getattr(each, "__name__", ""))
def test_the_schema_has_the_keys_of_the_code(kind: Any, schema: dict[str, Any]) -> None:
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == set(keys_of(kind))


def test_the_schema_needs_nothing_from_elsewhere() -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, list):
            return [each for item in node for each in references(item)]
        if not isinstance(node, dict):
            return []
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for item in node.values() for each in references(item)]

    assert references(SCHEMA) and all(each.startswith("#/") for each in references(SCHEMA))


def test_the_schema_is_strict_wherever_the_chart_owns_the_block() -> None:
    def walk(values: Any, schema: Any, path: str) -> None:
        if "$ref" in schema:
            found: Any = SCHEMA
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            return walk(values, found, path)
        if isinstance(values, dict) and "properties" in schema:
            assert schema["additionalProperties"] is False, path
            assert values.keys() <= schema["properties"].keys(), path
            for key, value in values.items():
                walk(value, schema["properties"][key], f"{path}.{key}")

    walk(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA, "")


def test_probes_and_smoke_test_ask_for_what_there_is() -> None:
    assert f'"service" "{ADMIN}"' in (CHART / "templates" / "gateway.yaml").read_text()
    for command, options in (("status", {"--wait", "--endpoint"}), ("generate", {"--max-tokens", "--temperature"})):
        assert options <= {each for parameter in command_of(command).params for each in parameter.opts}
