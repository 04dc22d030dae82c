"""The mode kuberay: a RayCluster and a RayJob that the operator takes, and that fit each other."""

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import Object, of_kind, rendered, values
from tests.helm.kuberay import mistakes

pytestmark = pytest.mark.grid

CONTAINERS = "headGroupSpec/template/spec/containers"
V2 = {"name": "RAY_enable_autoscaler_v2", "value": "1"}
ADDRESS = {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}
# Words, and what was put where into a cluster with the autoscaler, or without it.
SCALED: dict[str, tuple[str, Any]] = {
    "head: there is no container": (CONTAINERS, []),
    "prefill: there is no container": ("workerGroupSpecs/0/template/spec/containers", []),
    "head: a/b/c is no key of a label": ("headGroupSpec/labels", {"a/b/c": "d"}),
    "prefill: -dashed is no label": ("workerGroupSpecs/0/labels", {"pool": "-dashed"}),
    "prefill: minReplicas is negative": ("workerGroupSpecs/0/minReplicas", -1),
    "prefill: maxReplicas is negative": ("workerGroupSpecs/0/maxReplicas", -1),
    "prefill: minReplicas is above maxReplicas": ("workerGroupSpecs/0/minReplicas", 4),
    "'minReplicas' is a required property": ("workerGroupSpecs/0", {"groupName": "a", "maxReplicas": 1}),
    "prefill: is suspended while the autoscaler is on": ("workerGroupSpecs/0/suspend", True),
    "prefill: idleTimeoutSeconds is negative": ("workerGroupSpecs/0/idleTimeoutSeconds", -1),
    "prefill: restartPolicy must be Never with autoscaler v2": (
        "workerGroupSpecs/0/template/spec/restartPolicy",
        "Always",
    ),
    "head: restartPolicy must be Never with autoscaler v2": ("headGroupSpec/template/spec/restartPolicy", "Always"),
    "RAY_enable_autoscaler_v2 and autoscalerOptions.version": (f"{CONTAINERS}/0/env", [V2]),
    "autoscalerOptions.idleTimeoutSeconds is negative": ("autoscalerOptions/idleTimeoutSeconds", -1),
    "KUBERAY_GEN_AUTOSCALER_START_CMD is the operator's": (
        "autoscalerOptions/env",
        [{"name": "KUBERAY_GEN_AUTOSCALER_START_CMD"}],
    ),
    "authOptions: enableK8sTokenAuth and secretName": ("authOptions/enableK8sTokenAuth", True),
    "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions": (f"{CONTAINERS}/0/env", [ADDRESS]),
    "the user of Redis stands outside": ("headGroupSpec/rayStartParams/redis-username", "me"),
    "rocksdb needs a feature gate": ("gcsFaultToleranceOptions", {"backend": "rocksdb"}),
    "Redis and storage": ("gcsFaultToleranceOptions", {"redisAddress": "redis:6379", "storage": {}}),
}
UNSCALED: dict[str, tuple[str, Any]] = {
    "RAY_enable_autoscaler_v2 is on and enableInTreeAutoscaling is not": (f"{CONTAINERS}/0/env", [V2]),
    "prefill: idleTimeoutSeconds needs autoscaler v2": ("workerGroupSpecs/0/idleTimeoutSeconds", 60),
    "prefill: priority needs autoscaler v2": ("workerGroupSpecs/0/priority", 1),
    "prefill: replicas lie outside of minReplicas and maxReplicas": ("workerGroupSpecs/0/replicas", 7),
    "authOptions.enableK8sTokenAuth needs mode token": (
        "authOptions",
        {"mode": "disabled", "enableK8sTokenAuth": True},
    ),
    "rayVersion 2.52.0": ("rayVersion", "2.51.0"),
}
JOB: dict[str, Object] = {
    "clusterSelector does not allow a backoffLimit": {"backoffLimit": 1},
    "clusterSelector does not allow suspend": {"suspend": True, "shutdownAfterJobFinishes": True},
    "clusterSelector does not allow SidecarMode": {"submissionMode": "SidecarMode"},
    "clusterSelector names no ray.io/cluster": {"clusterSelector": {"a": "b"}},
    "neither rayClusterSpec nor clusterSelector says where it runs": {"clusterSelector": {}},
    "InteractiveMode does not allow a backoffLimit": {"submissionMode": "InteractiveMode", "backoffLimit": 1},
    "ttlSecondsAfterFinished needs shutdownAfterJobFinishes": {"ttlSecondsAfterFinished": 5},
    "suspend needs shutdownAfterJobFinishes": {"suspend": True},
    "activeDeadlineSeconds must be positive": {"activeDeadlineSeconds": 0},
    "preRunningDeadlineSeconds: 0 is less than the minimum of 1": {"preRunningDeadlineSeconds": 0},
    "backoffLimit is negative": {"backoffLimit": -1},
    "clusterSelector does not allow a deletionStrategy that takes pods": {
        "deletionStrategy": {"deletionRules": [{"policy": "DeleteCluster", "condition": {"jobStatus": "FAILED"}}]}
    },
}


def cluster(name: str, *options: str) -> Object:
    (found,) = of_kind(rendered(values(name), *options), "RayCluster")
    return found


def job(name: str, *options: str) -> Object:
    (found,) = of_kind(rendered(values(name), *options), "RayJob")
    return found


def put(custom: Object, path: str, value: Any) -> Object:
    """Another one, with that below `spec`."""
    changed: Any = copy.deepcopy(custom)
    node = changed["spec"]
    *above, last = path.split("/")
    for key in above:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    node[int(last) if isinstance(node, list) else last] = value
    return changed


@pytest.mark.parametrize("words", SCALED)
def test_what_the_operator_refuses_with_its_autoscaler_would_be_noticed(words: str) -> None:
    assert any(words in each for each in mistakes(put(cluster("kuberay-elastic"), *SCALED[words])))


@pytest.mark.parametrize("words", UNSCALED)
def test_what_the_operator_refuses_without_its_autoscaler_would_be_noticed(words: str) -> None:
    assert any(words in each for each in mistakes(put(cluster("kuberay"), *UNSCALED[words])))


@pytest.mark.parametrize("words", JOB)
def test_what_the_operator_refuses_of_a_job_would_be_noticed(words: str) -> None:
    made = job("kuberay")
    assert any(words in each for each in mistakes(made | {"spec": made["spec"] | JOB[words]}))


@pytest.mark.parametrize("name", ["Upper", "7up", "dash-", "a" * 54])
def test_a_name_that_the_operator_refuses_would_be_noticed(name: str) -> None:
    assert mistakes(cluster("kuberay") | {"metadata": {"name": name}})


@pytest.mark.parametrize(("key", "value"), [("RAY_REDIS_ADDRESS", "a:1"), ("REDIS_PASSWORD", "x")])
def test_redis_said_twice_would_be_noticed(key: str, value: str) -> None:
    tolerant = put(cluster("kuberay"), "gcsFaultToleranceOptions", {"redisAddress": "redis:6379"})
    assert mistakes(tolerant) == []
    assert f"gcsFaultToleranceOptions and {key}" in mistakes(
        put(tolerant, f"{CONTAINERS}/0/env", [{"name": key, "value": value}])
    )


def test_a_job_gets_a_new_name_with_all_that_ends_it() -> None:
    def name(*options: str) -> Any:
        return job("kuberay", *options)["metadata"]["name"]

    changes = (
        "cluster.gateway.max_requests=7",
        "image.tag=another",
        "pools.decode.shmSize=2Gi",
        "head.nodeSelector.disk=fast",
        "gateway.auth.existingSecret=keys",
        "gateway.auth.existingSecret=keys,gateway.auth.key=other",
        "kuberay.submissionMode=K8sJobMode",
    )
    names = [name(), *(name("--set", change) for change in changes)]
    assert len(set(names)) == len(names)


def test_a_job_keeps_its_name_when_nothing_of_it_changes() -> None:
    assert job("kuberay") == job("kuberay", "--set", "pdb.enabled=false,gateway.service.type=LoadBalancer")


def served(folder: Path, failures: int, retries: int) -> tuple[int, int]:
    """How the rendered entrypoint ends where serving fails so often, and how often it was tried."""
    calls = folder / "calls"
    programs = {
        "diptych": f'echo "$@" >> {calls}; test "$(wc -l < {calls})" -gt {failures}',
        "sha256sum": "cat > /dev/null",  # the file is there
        "sleep": ":",
    }
    for program, script in programs.items():
        (folder / program).write_text(f"#!/bin/sh\n{script}\n")
        (folder / program).chmod(0o755)
    entrypoint = job("kuberay", "--set", f"kuberay.retries={retries}")["spec"]["entrypoint"]
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    code = subprocess.run(entrypoint, shell=True, env=environment, timeout=30).returncode
    lines = calls.read_text().splitlines()
    assert set(lines) == {"serve -f /etc/diptych/cluster.yaml"}
    return code, len(lines)


@pytest.mark.parametrize(("failures", "ends"), [(0, (0, 1)), (2, (0, 3)), (9, (1, 3))])
def test_a_job_tries_again_so_often(failures: int, ends: tuple[int, int], tmp_path: Path) -> None:
    assert served(tmp_path, failures, retries=2) == ends


def test_the_pod_that_submits_gets_in_and_is_locked_down() -> None:
    options = "podDefaults.nodeSelector.disk=fast,podDefaults.podLabels.team=llm,imagePullSecrets[0].name=registry"
    objects = rendered(values("kuberay-elastic"), "--set", options)
    (made,), (policy,) = of_kind(objects, "RayJob"), of_kind(objects, "NetworkPolicy")
    template, labels = made["spec"]["submitterPodTemplate"], policy["spec"]["podSelector"]["matchLabels"]
    pod, (submitter,) = template["spec"], template["spec"]["containers"]
    assert {"podSelector": {"matchLabels": labels}} in policy["spec"]["ingress"][0]["from"]
    assert (labels | {"team": "llm"}).items() <= template["metadata"]["labels"].items()
    assert pod["imagePullSecrets"] == [{"name": "registry"}] and pod["nodeSelector"] == {"disk": "fast"}
    assert "command" not in submitter and pod["restartPolicy"] == "Never"  # the operator writes what to submit
    head = cluster("kuberay-elastic")["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert all(submitter[key] == head[key] for key in ("image", "imagePullPolicy", "securityContext"))
    assert not any(each.get("persistentVolumeClaim") for each in pod["volumes"])


def test_the_operator_submits_without_a_pod() -> None:
    assert not [key for key in job("kuberay")["spec"] if key.startswith("submitter")]


def test_how_many_pods_a_scaled_pool_has_is_left_to_the_autoscaler() -> None:
    pools = json.dumps(
        [
            {"name": "prefill", "role": "prefill", "replicas": {"min": 1, "max": 3}},
            {"name": "decode", "role": "decode", "replicas": 2},
        ]
    )
    prefill, decode = cluster("kuberay", "--set-json", f"cluster.pools={pools}")["spec"]["workerGroupSpecs"]
    assert "replicas" not in prefill
    assert decode["replicas"] == 2


def test_rays_autoscaler_reads_the_pools_out_of_the_cluster() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as derive

    made = cluster("kuberay-elastic")
    nodes = derive(made | {"metadata": made["metadata"] | {"namespace": "llm"}})["available_node_types"]
    assert {
        name: (node["min_workers"], node["max_workers"]) for name, node in nodes.items() if node["max_workers"]
    } == {
        "prefill": (1, 3),
        "decode": (0, 4),
    }
    assert nodes["prefill"]["labels"] == {"pool": "prefill"} and nodes["prefill"]["resources"]["CPU"] == 4
    assert nodes["decode"]["resources"]["decode"] == 1


@pytest.mark.parametrize(
    ("replicas", "most", "stay"),
    [("3", "1", 2), ("1", "1", None), ('{"min": 2, "max": 5}', "1", 1), ("3", '"50%"', 1), ("4", '"10%"', 3)],
)
def test_budgets_are_numbers_of_pods(replicas: str, most: str, stay: int | None) -> None:
    pools = f'[{{"name": "both", "role": "mixed", "replicas": {replicas}}}]'
    found = rendered(
        values("kuberay"), "--set-json", f"cluster.pools={pools}", "--set-json", f"pdb.maxUnavailable={most}"
    )
    budgets = [each["spec"] for each in of_kind(found, "PodDisruptionBudget")]
    assert [budget["minAvailable"] for budget in budgets] == ([] if stay is None else [stay])
    assert not any("maxUnavailable" in budget for budget in budgets)
    (group,) = cluster("kuberay", "--set-json", f"cluster.pools={pools}")["spec"]["workerGroupSpecs"]
    for budget in budgets:
        assert budget["minAvailable"] < group["minReplicas"]
        labels = group["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_names_that_yaml_would_read_as_something_else_stay_names() -> None:
    pool = '[{"name": "1", "role": "mixed", "resources": {"cpu": 1, "custom": {"2": 1}}}]'
    named = ("--set-string", "fullnameOverride=true,ray.auth.existingSecret=3,image.tag=4")
    options = (*named, "--set-json", f"cluster.pools={pool}", "--set", "kuberay.submissionMode=K8sJobMode")
    made, ray = job("kuberay", *options), cluster("kuberay", *options)
    assert made["spec"]["clusterSelector"] == {"ray.io/cluster": ray["metadata"]["name"]} == {"ray.io/cluster": "true"}
    (group,) = ray["spec"]["workerGroupSpecs"]
    assert group["groupName"] == "1" and group["resources"]["2"] == "1"
    assert ray["spec"]["authOptions"]["secretName"] == "3"
    assert made["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["image"] == "diptych:4"
