"""What KubeRay 1.7 accepts: its own definitions as strict schemas, and the rules that its operator adds to them.

Knows nothing of our chart.
"""

import gzip
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

DATA = Path(__file__).resolve().parents[1] / "data" / "k8s"
Object = dict[str, Any]
Found = list[tuple[Any, str]]  # what is wrong where the first is true

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST = {"RayCluster": 53, "RayJob": 47}  # names of Services and RayClusters are made of them
LABEL = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

TOKENS, K8S_TOKENS, PRIORITIES = (2, 52, 0), (2, 55, 0), (2, 56, 0)  # the Ray that first has them
GATED = ("networkPolicy", "tlsOptions", "historyServerOptions")
COUNTED = ("num-cpus", "num-gpus", "memory", "resources")
SCALER = "RAY_enable_autoscaler_v2"
SCALER_COMMAND = "KUBERAY_GEN_AUTOSCALER_START_CMD"
FAULT_TOLERANT, STORAGE_NAMESPACE = "ray.io/ft-enabled", "ray.io/external-storage-namespace"
REDIS = ("redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace")


def mistakes(custom: Object) -> list[str]:
    """What is wrong with a RayCluster or RayJob; nothing: the operator would take it."""
    kind, metadata = custom["kind"], custom["metadata"]
    found = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in jsonschema.Draft202012Validator(_schema(kind)).iter_errors(custom)
    ]
    if found:
        return found
    named: Found = [
        (len(metadata["name"]) > LONGEST[kind], f"the name is longer than {LONGEST[kind]} characters"),
        (not NAME.fullmatch(metadata["name"]), "the name must begin with a letter, and have a-z, 0-9 and dashes"),
    ]
    check = _cluster_mistakes if kind == "RayCluster" else _job_mistakes
    return [words for is_wrong, words in named if is_wrong] + check(custom["spec"], metadata.get("annotations") or {})


def _cluster_mistakes(spec: Object, annotations: dict[str, str]) -> list[str]:
    found = _scaler_mistakes(spec) + _storage_mistakes(spec, annotations) + _token_mistakes(spec)
    for group in [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]:
        found += [(is_wrong, f"{group.get('groupName', 'head')}: {words}") for is_wrong, words in _pod_mistakes(group)]
    for group in spec.get("workerGroupSpecs", []):
        found += [(is_wrong, f"{group['groupName']}: {words}") for is_wrong, words in _group_mistakes(group, spec)]
    found += [(key in spec, f"{key}: needs a feature gate") for key in GATED]
    return [words for is_wrong, words in found if is_wrong]


def _pod_mistakes(group: Object) -> Found:
    parameters = group.get("rayStartParams") or {}
    both = group.get("resources") and any(parameters.get(key) for key in COUNTED)
    return [
        (not group["template"]["spec"].get("containers"), "there is no container"),
        (both, "resources stand in rayStartParams and in resources"),
        ("labels" in parameters, "labels stand in rayStartParams"),
        *((not _is_key(key), f"{key} is no key of a label") for key in group.get("labels") or {}),
        *((not LABEL.fullmatch(each), f"{each} is no label") for each in (group.get("labels") or {}).values()),
    ]


def _group_mistakes(group: Object, spec: Object) -> Found:
    scaled, v2 = spec.get("enableInTreeAutoscaling", False), _runs_v2(spec)
    least, most = group["minReplicas"], group["maxReplicas"]
    priority = group.get("priority", 0)
    return [
        (least < 0, "minReplicas is negative"),
        (most < 0, "maxReplicas is negative"),
        (least > most, "minReplicas is above maxReplicas"),
        (not least <= group.get("replicas", least) <= most, "replicas lie outside of minReplicas and maxReplicas"),
        (scaled and group.get("suspend"), "is suspended while the autoscaler is on"),
        (group.get("idleTimeoutSeconds", 0) < 0, "idleTimeoutSeconds is negative"),
        ("idleTimeoutSeconds" in group and not v2, "idleTimeoutSeconds needs autoscaler v2"),
        (priority and not v2, "priority needs autoscaler v2"),
        (priority and _version(spec) < PRIORITIES, "priority needs rayVersion 2.56.0"),
        (_restarts(group) and _is_v2(spec), "restartPolicy must be Never with autoscaler v2"),
    ]


def _scaler_mistakes(spec: Object) -> Found:
    scaled, options = spec.get("enableInTreeAutoscaling", False), spec.get("autoscalerOptions") or {}
    on = _environment(spec).get(SCALER) in ("1", "true")
    given = [each["name"] for each in options.get("env") or []]
    return [
        (on and not scaled, f"{SCALER} is on and enableInTreeAutoscaling is not"),
        (scaled and "version" in options and SCALER in _environment(spec), f"{SCALER} and autoscalerOptions.version"),
        (options.get("idleTimeoutSeconds", 0) < 0, "autoscalerOptions.idleTimeoutSeconds is negative"),
        (SCALER_COMMAND in given, f"autoscalerOptions.env: {SCALER_COMMAND} is the operator's"),
        (_restarts(spec["headGroupSpec"]) and _is_v2(spec), "head: restartPolicy must be Never with autoscaler v2"),
    ]


def _storage_mistakes(spec: Object, annotations: dict[str, str]) -> Found:
    """Of GCS fault tolerance."""
    options, environment = spec.get("gcsFaultToleranceOptions"), _environment(spec)
    parameters = spec["headGroupSpec"].get("rayStartParams") or {}
    enabled = options is not None or annotations.get(FAULT_TOLERANT, "").lower() == "true"
    user = parameters.get("redis-username") or "REDIS_USERNAME" in environment
    found: Found = [
        (user, "the user of Redis stands outside of gcsFaultToleranceOptions"),
        (not enabled and "RAY_REDIS_ADDRESS" in environment, "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"),
    ]
    if options is None:
        return found
    embedded = options.get("backend") == "rocksdb"
    found += [
        ("REDIS_PASSWORD" in environment, "gcsFaultToleranceOptions and REDIS_PASSWORD"),
        ("RAY_REDIS_ADDRESS" in environment, "gcsFaultToleranceOptions and RAY_REDIS_ADDRESS"),
        (parameters.get("redis-password"), "gcsFaultToleranceOptions and redis-password"),
        *((annotations.get(key), f"gcsFaultToleranceOptions and {key}") for key in (FAULT_TOLERANT, STORAGE_NAMESPACE)),
        (embedded, "gcsFaultToleranceOptions.backend: rocksdb needs a feature gate"),
        (embedded and any(key in options for key in REDIS), "gcsFaultToleranceOptions: rocksdb and settings of Redis"),
        (not embedded and "storage" in options, "gcsFaultToleranceOptions: Redis and storage"),
    ]
    return found


def _token_mistakes(spec: Object) -> Found:
    options = spec.get("authOptions") or {}
    tokens, of_kubernetes = options.get("mode") == "token", options.get("enableK8sTokenAuth")
    version = _version(spec)
    return [
        (tokens and version < TOKENS, "authOptions.mode is token, which needs rayVersion 2.52.0"),
        (of_kubernetes and not tokens, "authOptions.enableK8sTokenAuth needs mode token"),
        (of_kubernetes and version < K8S_TOKENS, "authOptions.enableK8sTokenAuth needs rayVersion 2.55.0"),
        (of_kubernetes and options.get("secretName"), "authOptions: enableK8sTokenAuth and secretName"),
    ]


def _job_mistakes(spec: Object, annotations: dict[str, str]) -> list[str]:
    selector, cluster, mode = spec.get("clusterSelector"), spec.get("rayClusterSpec"), spec.get("submissionMode")
    shuts_down, again = spec.get("shutdownAfterJobFinishes", False), spec.get("backoffLimit", 0)
    suspended, ttl_s = spec.get("suspend", False), spec.get("ttlSecondsAfterFinished", 0)
    own = "submitterPodTemplate" in spec or "submitterConfig" in spec
    found: Found = [
        (not selector and cluster is None, "neither rayClusterSpec nor clusterSelector says where it runs"),
        (selector and not selector.get("ray.io/cluster"), "clusterSelector names no ray.io/cluster"),
        (selector and suspended, "clusterSelector does not allow suspend"),
        (selector and mode == "SidecarMode", "clusterSelector does not allow SidecarMode"),
        (selector and again > 0, "clusterSelector does not allow a backoffLimit"),
        (mode == "InteractiveMode" and again > 0, "InteractiveMode does not allow a backoffLimit"),
        (mode == "SidecarMode" and own, "SidecarMode does not allow submitterPodTemplate and submitterConfig"),
        (suspended and not shuts_down, "suspend needs shutdownAfterJobFinishes"),
        (ttl_s and not shuts_down, "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"),
        (ttl_s < 0, "ttlSecondsAfterFinished is negative"),
        (again < 0, "backoffLimit is negative"),
        (spec.get("activeDeadlineSeconds", 1) <= 0, "activeDeadlineSeconds must be positive"),
        (selector and _deletes_pods(spec), "clusterSelector does not allow a deletionStrategy that takes pods"),
        (((cluster or {}).get("authOptions") or {}).get("enableK8sTokenAuth"), "enableK8sTokenAuth is not for jobs"),
    ]
    inside = _cluster_mistakes(cluster, annotations) if cluster else []
    return [words for is_wrong, words in found if is_wrong] + inside


def _deletes_pods(job: Object) -> bool:
    strategy = job.get("deletionStrategy") or {}
    rules = [*strategy.get("deletionRules", []), strategy.get("onSuccess", {}), strategy.get("onFailure", {})]
    return any(each.get("policy") in ("DeleteCluster", "DeleteWorkers") for each in rules)


def _is_key(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    return bool(name and LABEL.fullmatch(name)) and (not slash or bool(PREFIX.fullmatch(prefix)))


def _is_v2(spec: Object) -> bool:
    return bool(spec.get("enableInTreeAutoscaling")) and (spec.get("autoscalerOptions") or {}).get("version") == "v2"


def _runs_v2(spec: Object) -> bool:
    return _is_v2(spec) or _environment(spec).get(SCALER) in ("1", "true")


def _restarts(group: Object) -> bool:
    return group["template"]["spec"].get("restartPolicy", "Never") != "Never"


def _version(spec: Object) -> tuple[int, ...]:
    return tuple(int(part) for part in spec.get("rayVersion", "0").split("."))


def _environment(spec: Object) -> dict[str, str]:
    """Of the head's first container, which runs Ray."""
    (container, *_) = spec["headGroupSpec"]["template"]["spec"].get("containers") or [{}]
    return {each["name"]: each.get("value", "") for each in container.get("env") or []}


@cache
def _schema(kind: str) -> Object:
    with gzip.open(DATA / f"ray.io_{kind.lower()}s.yaml.gz") as file:
        definition = yaml.load(file, Loader=yaml.CSafeLoader)
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema: Object = _strict(version["schema"]["openAPIV3Schema"])
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
