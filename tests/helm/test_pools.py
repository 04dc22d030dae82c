"""Pods of pools are Ray nodes on which exactly the workers of these pools fit."""

import json
import math
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.runtime.placement import RESERVED, bundle, has_labels
from cluster.spec import PoolSpec
from tests.helm.chart import VALUES, Object, mounted, of_kind, rendered, values
from tests.helm.chart import pods as every_pod

pytestmark = pytest.mark.grid

WITH_PODS = [path for path in VALUES if not path.stem.startswith("external")]
EACH = pytest.mark.parametrize("path", WITH_PODS, ids=lambda path: path.stem)


@dataclass(frozen=True)
class Pods:
    """The pods of a pool as Ray will count them. `least` and `most` None: somebody else says how many."""

    least: int | None
    most: int | None
    resources: dict[str, float]
    labels: dict[str, str]
    container: Object


def pods_of(objects: tuple[Object, ...]) -> dict[str, Pods]:
    found = {}
    for each in of_kind(objects, "StatefulSet"):
        pool = each["metadata"]["labels"].get("diptych/pool")
        container = each["spec"]["template"]["spec"]["containers"][0]
        if pool:
            found[pool] = _started(each["spec"].get("replicas"), container)
    for each in of_kind(objects, "RayCluster"):
        for group in each["spec"]["workerGroupSpecs"]:
            resources = {key: float(amount) for key, amount in group["resources"].items()}
            container = group["template"]["spec"]["containers"][0]
            found[group["groupName"]] = Pods(
                group["minReplicas"], group["maxReplicas"], resources, group["labels"], container
            )
    return found


def options(container: Object) -> dict[str, str]:
    return dict(each.removeprefix("--").partition("=")[::2] for each in container["args"] if each.startswith("--"))


def _started(replicas: int | None, container: Object) -> Pods:
    given = options(container)
    counted = {"CPU": float(given["num-cpus"]), "GPU": float(given["num-gpus"])}
    labels = dict(each.split("=") for each in given["labels"].split(","))
    return Pods(replicas, replicas, counted | json.loads(given["resources"]), labels, container)


@EACH
def test_every_worker_has_room_and_no_pod_is_left_over(path: Path, tmp_path: Path) -> None:
    objects = rendered(path)
    spec, there = mounted(objects, tmp_path), pods_of(objects)
    assert there.keys() == {pool.name for pool in spec.pools}
    for pool in spec.pools:
        pods, ranks = there[pool.name], pool.parallel.world_size
        per_pod = 1 if "spread" in pool.parallel.placement else ranks
        for kind, amount in bundle(pool.resources).items():
            room = pods.resources[kind] / amount
            assert math.floor(room + 1e-9) == per_pod or kind == "CPU", (pool.name, kind)
            assert room >= per_pod
        if pods.least is None or pods.most is None:
            assert path.stem.startswith("native-autoscaled") and pool.bounds[0] < pool.bounds[1]
            continue
        assert pods.most * per_pod == pool.max_ranks
        scaled = bool(of_kind(objects, "RayCluster"))
        assert pods.least * per_pod == (pool.num_ranks if scaled else pool.max_ranks)


@EACH
def test_every_pool_lies_on_its_own_pods(path: Path, tmp_path: Path) -> None:
    objects = rendered(path)
    there = pods_of(objects)
    for pool in mounted(objects, tmp_path).pools:
        wanted = {key: value for key, value in pool.resources.labels.items() if not key.startswith(RESERVED)}
        assert has_labels(there[pool.name].labels, wanted)
        if "pool" in wanted or pool.resources.custom:
            assert [name for name, pods in there.items() if takes(pods, pool)] == [pool.name]


def takes(pods: Pods, pool: PoolSpec) -> bool:
    """Whether Ray would place a rank of the pool there."""
    wanted = {key: value for key, value in pool.resources.labels.items() if not key.startswith(RESERVED)}
    room = all(pods.resources.get(kind, 0) >= amount for kind, amount in bundle(pool.resources).items())
    return room and has_labels(pods.labels, wanted)


@EACH
def test_containers_ask_kubernetes_for_what_ray_counts(path: Path) -> None:
    for name, pods in pods_of(rendered(path)).items():
        resources = pods.container["resources"]
        asked = {**resources.get("requests", {}), **resources.get("limits", {})}
        if pods.resources["CPU"]:
            assert float(asked["cpu"]) >= pods.resources["CPU"], name
        devices = sum(int(each) for key, each in asked.items() if key in ("nvidia.com/gpu", "example.com/a100"))
        claimed = "claims" in resources  # how many, the claim's template says
        assert devices == (0 if claimed else pods.resources["GPU"])


@pytest.mark.parametrize("name", ["native-claimed-gpu", "kuberay-claimed-gpu"])
def test_gpus_may_come_by_claims(name: str) -> None:
    claimed = {}
    for pod, spec in every_pod(rendered(values(name))):
        resources = spec["containers"][0]["resources"]
        claims = {each["name"]: each["resourceClaimTemplateName"] for each in spec.get("resourceClaims", [])}
        assert [each["name"] for each in resources.get("claims", [])] == list(claims)
        assert "nvidia.com/gpu" not in str(resources)
        if claims:
            claimed[pod.rpartition("-")[2]] = list(claims.values())
    assert claimed == {"prefill": ["one-gpu"], "decode": ["two-gpus"]}


@cache
def ray_start_options() -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.scripts.scripts import start
    return {option for parameter in start.params for option in parameter.opts}


def nodes(objects: tuple[Object, ...]) -> list[Object]:
    """Workloads whose pods are nodes of Ray."""
    found = of_kind(objects, "StatefulSet") + of_kind(objects, "Deployment")
    return [each for each in found if not each["metadata"]["name"].endswith("-autoscaler")]


@EACH
def test_ray_start_knows_every_option(path: Path) -> None:
    known = ray_start_options()
    objects = rendered(path)
    for each in nodes(objects):
        container = each["spec"]["template"]["spec"]["containers"][0]
        used = [part.partition("=")[0] for part in container["command"] + container["args"] if part.startswith("--")]
        assert used and set(used) <= known
    for each in of_kind(objects, "RayCluster"):
        for group in [each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"]]:
            assert {f"--{key}" for key in group["rayStartParams"]} <= known


@EACH
def test_nothing_is_placed_on_head_and_gateway(path: Path) -> None:
    objects = rendered(path)
    for each in nodes(objects):
        if "diptych/pool" not in each["metadata"]["labels"]:
            given = options(each["spec"]["template"]["spec"]["containers"][0])
            assert (given["num-cpus"], given["num-gpus"]) == ("0", "0")
    for each in of_kind(objects, "RayCluster"):
        assert each["spec"]["headGroupSpec"]["resources"] == {"CPU": "0"}


def test_rays_autoscaler_is_on_where_pools_may_grow() -> None:
    def scaled(name: str) -> Any:
        (cluster,) = of_kind(rendered(values(name)), "RayCluster")
        return cluster["spec"].get("enableInTreeAutoscaling", False)

    assert scaled("kuberay-elastic") and not scaled("kuberay")


def test_settings_of_a_pool_stand_before_those_of_all() -> None:
    there = pods_of(rendered(values("native-gpu")))
    h100, a100 = there["h100"].container, there["a100"].container
    assert h100["resources"] == {
        "requests": {"cpu": "16"},
        "limits": {"nvidia.com/gpu": "4", "memory": "400Gi", "rdma/hca_shared_devices_a": "2"},
    }
    assert h100["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert a100["resources"]["limits"] == {"example.com/a100": "8"}
    assert "add" not in a100["securityContext"]["capabilities"]


@pytest.mark.parametrize(("name", "having"), [("native-gpu", ["release-diptych-h100"]), ("kuberay-gpu", ["both"])])
def test_only_pools_move_kv_and_have_the_device_for_it(name: str, having: list[str]) -> None:
    found = []
    for pod, spec in every_pod(rendered(values(name))):
        limits = spec["containers"][0]["resources"].get("limits", {})
        has_device, may_lock = "rdma/hca_shared_devices_a" in limits, "IPC_LOCK" in str(spec["containers"][0])
        assert has_device == may_lock, pod
        found += [pod] if has_device else []
    assert found == having


def test_every_setting_of_pods_reaches_every_pod() -> None:
    objects = rendered(values("native-every-setting"))
    for each in of_kind(objects, "StatefulSet") + of_kind(objects, "Deployment"):
        template = each["spec"]["template"]
        pod = template["spec"]
        for key in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints"):
            assert pod[key], key
        scheduled = [
            pod[key] for key in ("priorityClassName", "runtimeClassName", "schedulerName", "serviceAccountName")
        ]
        assert scheduled == ["high", "nvidia", "volcano", "existing"]
        assert pod["terminationGracePeriodSeconds"] == 90
        assert template["metadata"]["labels"]["team"] == "llm"
        assert template["metadata"]["annotations"]["example.com/scrape"] == "true"
        assert [each["name"] for each in pod["containers"]][1:] == ["logs"]
        assert [each["name"] for each in pod["initContainers"]][-1] == "warm"
        container = pod["containers"][0]
        assert {"UCX_TLS", "NODE"} <= {each["name"] for each in container["env"]}
        assert container["envFrom"] == [{"configMapRef": {"name": "proxy"}}]
        assert "/etc/ssl/own" in {each["mountPath"] for each in container["volumeMounts"]}


def test_the_smoke_test_runs_where_the_other_pods_may() -> None:
    (smoke,) = of_kind(rendered(values("native-every-setting")), "Pod")
    (gateway,) = [
        each["spec"]["template"]
        for each in of_kind(rendered(values("native-every-setting")), "Deployment")
        if each["metadata"]["name"] == "llm-gateway"
    ]
    scheduled = ("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName", "schedulerName")
    for key in (*scheduled, "serviceAccountName", "automountServiceAccountToken", "securityContext"):
        assert smoke["spec"][key] == gateway["spec"][key], key
    assert "topologySpreadConstraints" not in smoke["spec"]
    assert smoke["metadata"]["labels"]["team"] == "llm"
    assert smoke["metadata"]["annotations"].items() >= {"example.com/scrape": "true", "helm.sh/hook": "test"}.items()


def test_an_environment_of_one_s_own_stands_before_the_chart_s() -> None:
    own = '[{"name": "HF_HOME", "value": "/own"}, {"name": "A", "value": "1"}, {"name": "A", "value": "2"}]'
    for each in of_kind(rendered(values("native"), "--set-json", f"podDefaults.extraEnv={own}"), "StatefulSet"):
        env = each["spec"]["template"]["spec"]["containers"][0]["env"]
        names = [variable["name"] for variable in env]
        assert len(names) == len(set(names))
        assert {"name": "HF_HOME", "value": "/own"} in env and env[-1] == {"name": "A", "value": "2"}
        assert {"POD_IP", "RAY_AUTH_TOKEN", "DIPTYCH_CACHE"} <= set(names)


@pytest.mark.parametrize(
    ("name", "claim", "is_read_only"),
    [("native-own-claim", "release-diptych-models", False), ("native-models-on-a-claim", "models", True)],
)
def test_the_claim_with_models_is_mounted_where_the_cluster_block_says(
    name: str, claim: str, is_read_only: bool, tmp_path: Path
) -> None:
    objects = rendered(values(name))
    model = mounted(objects, tmp_path).model
    for pod, spec in every_pod(objects):
        if not pod.endswith("-smoke"):
            (volume,) = [each for each in spec["volumes"] if each["name"] == "models"]
            assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": is_read_only}
            (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "models"]
            assert model.startswith(mount["mountPath"] + "/") and mount["readOnly"] == is_read_only
    made = [each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")]
    assert made == ([claim] if name == "native-own-claim" else [])


def test_the_hub_s_token_is_for_pods_that_read_the_model() -> None:
    own = ("--set", "model.tokenSecret.name=hub")
    for name in ("native", "kuberay"):
        found = {
            pod.removeprefix("release-diptych-"): "HF_TOKEN" in str(spec["containers"][0]["env"])
            for pod, spec in every_pod(rendered(values(name), *own))
        }
        assert found.pop("smoke") is False
        assert found.pop("head") is (name == "kuberay"), "where gateways are in it"
        assert found and all(found.values())
