"""The kinds of the Prometheus operator, as strict schemas of our own; see tests/data/monitoring/schemas.yaml."""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).resolve().parents[1] / "data" / "monitoring" / "schemas.yaml"


@cache
def schemas() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(SCHEMAS.read_text())
    return found


def operator_mistakes(custom: dict[str, Any]) -> list[str]:
    """What is wrong with a ServiceMonitor, PodMonitor or PrometheusRule."""
    errors = jsonschema.Draft202012Validator(schemas()[custom["kind"]]).iter_errors(custom)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]
