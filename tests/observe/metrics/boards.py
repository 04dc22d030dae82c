"""The chart's dashboard and rules as lists of PromQL, with Grafana's variables put in."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

FILES = Path(__file__).resolve().parents[3] / "helm" / "diptych" / "files"
RULES = FILES / "rules.yaml"
BOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
NAME = re.compile(r"\b(diptych[a-z0-9_:]*)")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in GROUPS for rule in group["rules"]]


def put_in(query: str, *, job: str = "diptych", window: str = "1m") -> str:
    """The query as Grafana sends it, with all namespaces and classes chosen."""
    for variable, value in (("$__rate_interval", window), ("$namespace", ".*"), ("$job", job), ("$class", ".*")):
        query = query.replace(variable, value)
    return query


def queries() -> dict[str, str]:
    """Of every target of every panel, by panel, place and legend."""
    return {
        f"{panel['title']}/{panel['id']}{target['refId']}": put_in(target["expr"])
        for panel in panels()
        for target in panel["targets"]
    }


def names(query: str) -> set[str]:
    """Series that it asks for; values of labels are none."""
    return set(NAME.findall(re.sub(r'"[^"]*"', "", query)))
