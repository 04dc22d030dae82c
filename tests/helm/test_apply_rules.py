"""The small API server refuses changes and lists that Kubernetes refuses, and forgets what is no longer said."""

import copy
from typing import Any

import pytest
import yaml

from tests.helm.api_server import BUILT_IN, Refused, Store

pytestmark = pytest.mark.full

Object = dict[str, Any]

POD = """
containers:
  - name: main
    image: busybox
    env: [{name: HOME, value: /tmp}]
    ports: [{name: web, containerPort: 80}]
    volumeMounts: [{name: tmp, mountPath: /tmp}]
volumes: [{name: tmp, emptyDir: {}}]
restartPolicy: Always
"""
ROWS = """
StatefulSet: {apiVersion: apps/v1, spec: {replicas: 1, serviceName: door, podManagementPolicy: Parallel}}
Deployment: {apiVersion: apps/v1, spec: {replicas: 1}}
Job: {apiVersion: batch/v1, spec: {}}
Service: {apiVersion: v1, spec: {selector: {app: a}, ports: [{name: a, port: 1}]}}
PersistentVolumeClaim: {apiVersion: v1, spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}}
"""


def made(kind: str) -> Object:
    row = yaml.safe_load(ROWS)[kind]
    spec, labels = row["spec"], {"app": "a"}
    if kind in ("StatefulSet", "Deployment", "Job"):
        spec["template"] = {"metadata": {"labels": labels}, "spec": yaml.safe_load(POD)}
    if kind in ("StatefulSet", "Deployment"):
        spec["selector"] = {"matchLabels": dict(labels)}
    return row | {"kind": kind, "metadata": {"name": "one", "labels": dict(labels)}}


def written(store: Store, each: Object, how: str = "apply") -> Object:
    kind = next(kind for kind in BUILT_IN if kind.name == each["kind"])
    return store.write(kind, "llm", each["metadata"]["name"], copy.deepcopy(each), how=how, dry=False)


def changed(each: Object, path: str, value: Any) -> Object:
    """Another one; None: the key is taken out."""
    other = copy.deepcopy(each)
    *folders, name = path.split(".")
    node = other
    for folder in folders:
        node = node[folder]
    if value is None:
        del node[name]
    else:
        node[name] = value
    return other


FIXED = {
    "a StatefulSet's selector": (made("StatefulSet"), "spec.selector.matchLabels.more", "label"),
    "its Service": (made("StatefulSet"), "spec.serviceName", "other"),
    "its order, by leaving it out": (made("StatefulSet"), "spec.podManagementPolicy", None),
    "its claims": (
        made("StatefulSet"),
        "spec.volumeClaimTemplates",
        [{"metadata": {"name": "more"}, "spec": made("PersistentVolumeClaim")["spec"]}],
    ),
    "a Deployment's selector": (made("Deployment"), "spec.selector.matchLabels.more", "label"),
    "a Job's template": (made("Job"), "spec.template.spec.restartPolicy", "Never"),
    "a Service's address": (made("Service"), "spec.clusterIP", "10.96.0.7"),
    "a claim's modes": (made("PersistentVolumeClaim"), "spec.accessModes", ["ReadWriteOnce"]),
}
FREE = {
    "a StatefulSet's replicas": (made("StatefulSet"), "spec.replicas", 7),
    "its template": (made("StatefulSet"), "spec.template.spec.terminationGracePeriodSeconds", 7),
    "a Deployment's replicas": (made("Deployment"), "spec.replicas", 7),
    "a claim's size": (made("PersistentVolumeClaim"), "spec.resources.requests.storage", "2Gi"),
}


@pytest.mark.parametrize("what", FIXED)
@pytest.mark.parametrize("how", ["apply", "replace"])
def test_what_may_not_change_is_refused(what: str, how: str) -> None:
    before, path, value = FIXED[what]
    store = Store(BUILT_IN)
    first = written(store, before)
    with pytest.raises(Refused, match=f"spec.{path.split('.')[1]}: (field is immutable|may not change)"):
        written(store, changed(before, path, value), how)
    assert written(store, before)["spec"] == first["spec"]


@pytest.mark.parametrize("what", FREE)
def test_what_may_change_does(what: str) -> None:
    before, path, value = FREE[what]
    store = Store(BUILT_IN)
    written(store, before)
    after = changed(before, path, value)
    assert written(store, after)["spec"] == written(Store(BUILT_IN), after)["spec"]


TWICE = {
    "env": [{"name": "HOME", "value": "/a"}, {"name": "HOME", "value": "/b"}],
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "tmp", "mountPath": "/tmp"}],
    "ports": [{"name": "a", "containerPort": 8080}, {"name": "b", "containerPort": 8080}],
}


@pytest.mark.parametrize("key", TWICE)
def test_what_a_container_has_twice_is_refused(key: str) -> None:
    each = made("StatefulSet")
    each["spec"]["template"]["spec"]["containers"][0][key] = TWICE[key]
    with pytest.raises(Refused, match=rf"containers\[0\].{key}: Duplicate value"):
        written(Store(BUILT_IN), each)


def test_what_a_pod_or_a_service_has_twice_is_refused() -> None:
    each = made("Deployment")
    each["spec"]["template"]["spec"]["volumes"] *= 2
    with pytest.raises(Refused, match="volumes: Duplicate value: 'tmp'"):
        written(Store(BUILT_IN), each)
    service = made("Service")
    service["spec"]["ports"] = [{"name": "a", "port": 1}, {"name": "b", "port": 1}]
    with pytest.raises(Refused, match=r"spec\.ports: Duplicate value: 1"):
        written(Store(BUILT_IN), service)


def test_a_label_may_be_called_like_a_list() -> None:
    each = made("Deployment")
    each["spec"]["template"]["metadata"]["labels"]["env"] = "prod"
    assert written(Store(BUILT_IN), each)


def test_what_is_no_longer_applied_goes_and_what_others_wrote_stays() -> None:
    store, each = Store(BUILT_IN), made("Deployment")
    written(store, changed(each, "metadata.annotations", {"mine": "yes"}))
    written(store, {"kind": "Deployment", "metadata": {"name": "one", "labels": {"x": "y"}}}, "merge")
    after = written(store, each)["metadata"]
    assert "annotations" not in after and after["labels"] == {"app": "a", "x": "y"}
