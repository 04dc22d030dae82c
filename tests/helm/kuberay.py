"""What KubeRay 1.7 accepts: its own definitions as strict schemas, and the rules that its operator adds to them.

Knows nothing of our chart.
"""

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

DATA = Path(__file__).resolve().parents[1] / "data" / "k8s"
OLDEST_WITH_TOKENS = (2, 52, 0)
GATED = ("networkPolicy", "tlsOptions", "historyServerOptions")
COUNTED = ("num-cpus", "num-gpus", "memory", "resources")


def mistakes(custom: dict[str, Any]) -> list[str]:
    """What is wrong with a RayCluster or RayJob; nothing: the operator would take it."""
    found = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in jsonschema.Draft202012Validator(_schema(custom["kind"])).iter_errors(custom)
    ]
    if found:
        return found
    return _cluster_mistakes(custom["spec"]) if custom["kind"] == "RayCluster" else _job_mistakes(custom)


def _cluster_mistakes(spec: dict[str, Any]) -> list[str]:
    found = []
    scaled = spec.get("enableInTreeAutoscaling", False)
    groups = spec.get("workerGroupSpecs", [])
    for group in [spec["headGroupSpec"], *groups]:
        name, parameters = group.get("groupName", "head"), group.get("rayStartParams") or {}
        if group.get("resources") and any(key in parameters for key in COUNTED):
            found.append(f"{name}: resources stand in rayStartParams and in resources")
        if "labels" in parameters:
            found.append(f"{name}: labels stand in rayStartParams")
        policy = group["template"]["spec"].get("restartPolicy", "Never")
        if scaled and spec.get("autoscalerOptions", {}).get("version") == "v2" and policy != "Never":
            found.append(f"{name}: restartPolicy is {policy} with autoscaler v2")
    for group in groups:
        if not group["minReplicas"] <= group.get("replicas", 0) <= group["maxReplicas"]:
            found.append(f"{group['groupName']}: replicas lie outside of minReplicas and maxReplicas")
    if spec.get("authOptions", {}).get("mode") == "token":
        version = tuple(int(part) for part in spec.get("rayVersion", "0").split("."))
        if version < OLDEST_WITH_TOKENS:
            found.append("authOptions.mode is token, which needs rayVersion 2.52.0")
    return found + [f"{key}: needs a feature gate" for key in GATED if key in spec]


def _job_mistakes(job: dict[str, Any]) -> list[str]:
    found, spec = [], job["spec"]
    if len(job["metadata"]["name"]) > 47:
        found.append("the name is longer than 47 characters")
    if "rayClusterSpec" not in spec and not spec.get("clusterSelector", {}).get("ray.io/cluster"):
        found.append("neither rayClusterSpec nor clusterSelector says where it runs")
    if spec.get("clusterSelector") and (spec.get("suspend") or spec.get("submissionMode") == "SidecarMode"):
        found.append("clusterSelector allows neither suspend nor SidecarMode")
    return found


@cache
def _schema(kind: str) -> dict[str, Any]:
    with gzip.open(DATA / f"ray.io_{kind.lower()}s.yaml.gz") as file:
        definition = yaml.load(file, Loader=yaml.CSafeLoader)
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema: dict[str, Any] = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(schema: Any) -> Any:
    """As JSON schema, with unknown keys refused wherever the server would drop them."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    strict = {key: _strict(value) for key, value in schema.items()}
    open_ = strict.get("x-kubernetes-preserve-unknown-fields") is True or "additionalProperties" in strict
    if strict.get("type") == "object" and "properties" in strict and not open_:
        strict["additionalProperties"] = False
    return strict
