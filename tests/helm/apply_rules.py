"""What the API server makes of an object that is there and what somebody writes, and what of that it refuses.

The rules of Kubernetes for the kinds that a chart has; knows no server and nothing of our chart.
"""

import copy
from collections import Counter
from typing import Any

Object = dict[str, Any]

FREE = {
    "PersistentVolumeClaim": {"resources", "volumeAttributesClassName"},
    "StatefulSet": {
        "replicas",
        "ordinals",
        "template",
        "updateStrategy",
        "revisionHistoryLimit",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
    },
}
FIXED = {
    "Deployment": {"selector"},
    "Job": {"selector", "template", "completionMode"},
    "Service": {"clusterIP"},
}
KEYS = {
    "containers": ["name"],
    "env": ["name"],
    "imagePullSecrets": ["name"],
    "initContainers": ["name"],
    "ports": ["name", "containerPort"],
    "volumeMounts": ["mountPath"],
    "volumes": ["name"],
}
WITH_PODS = ("Pod", "Deployment", "StatefulSet", "Job", "RayCluster")


def merged(below: Any, above: Any) -> Any:
    """A merge patch: lists are replaced."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return copy.deepcopy(above)
    both = {key: value for key, value in below.items() if key not in above}
    return both | {key: merged(below.get(key), value) for key, value in above.items() if value is not None}


def without(below: Object, applied: Object) -> Object:
    """What others have written: an object less what its only owner applied last."""
    left = {}
    for key, value in below.items():
        if key not in applied:
            left[key] = value
        elif isinstance(value, dict) and isinstance(applied[key], dict) and (rest := without(value, applied[key])):
            left[key] = rest
    return left


def forbidden(old: Object, new: Object) -> list[str]:
    """What was changed and may not change."""
    kind, before, after = new["kind"], old.get("spec", {}), new.get("spec", {})
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if kind in FREE:
        found = [key for key in changed if key not in FREE[kind]]
        return [f"spec.{', spec.'.join(found)}: may not change after the creation"] if found else []
    return [f"spec.{key}: field is immutable" for key in changed if key in FIXED.get(kind, ())]


def repeated(data: Object) -> list[str]:
    """Entries of lists that have another's key."""
    if data["kind"] == "Service":
        ports = data["spec"].get("ports", [])
        return _twice(ports, "name", "spec.ports") + _twice(ports, "port", "spec.ports")
    return _in_pods(data["spec"], "spec") if data["kind"] in WITH_PODS else []


def _in_pods(node: Any, path: str) -> list[str]:
    if isinstance(node, list):
        return [words for index, each in enumerate(node) for words in _in_pods(each, f"{path}[{index}]")]
    if not isinstance(node, dict):
        return []
    found = [words for key, value in node.items() for words in _in_pods(value, f"{path}.{key}")]
    for key, names in KEYS.items():
        if isinstance(entries := node.get(key), list):
            found += [words for name in names for words in _twice(entries, name, f"{path}.{key}")]
    return found


def _twice(entries: list[Object], name: str, path: str) -> list[str]:
    counts = Counter(each[name] for each in entries if name in each)
    return [f"{path}: Duplicate value: {value!r}" for value, count in counts.items() if count > 1]
