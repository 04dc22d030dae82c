"""What the chart renders is what Kubernetes and KubeRay accept, for every set of values in `values/`."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml

from cluster.spec_file import load_spec
from tests.helm.chart import CHART, VALUES, Object, cluster_file, mounted, of_kind, pods, rendered, values
from tests.helm.kuberay import mistakes
from tests.helm.monitoring import operator_mistakes
from tests.helm.programs import run

OLDEST, NEWEST, OTHERS = "1.27", "1.37", ("1.31", "1.34")
VERSIONS = [NEWEST, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)]
FOREIGN = dict.fromkeys(("GRPCRoute", "HTTPRoute"), "gateway.networking.k8s.io/v1")
EACH = pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True, scope="module")
def each_schema_is_read_once() -> Iterator[None]:
    """The library reads two for each object."""
    reading = cache(kubernetes_validate.utils.schema_contents)
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", reading):
        yield


@pytest.mark.grid(keep=6)
@EACH
def test_it_passes_helm_lint(path: Path) -> None:
    code, out, err = run("helm", "lint", "--strict", CHART, "-f", path)
    assert code == 0, out + err


def test_the_defaults_pass_helm_lint() -> None:
    assert run("helm", "lint", "--strict", CHART)[0] == 0


@EACH
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_key(path: Path, version: str) -> None:
    check_keys(rendered(path, "--kube-version", version), version)


@pytest.mark.parametrize(
    "name",
    [
        *("native", "native-exposed", "native-every-setting", "native-scaled-gateways", "native-own-claim"),
        *("native-autoscaled", "external"),
    ],
)
def test_the_oldest_kubernetes_knows_every_key(name: str) -> None:
    asked_for = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert asked_for == f">={OLDEST}-0"
    check_keys(rendered(values(name), "--kube-version", OLDEST), OLDEST)


def check_keys(objects: tuple[Object, ...], version: str) -> None:
    for each in objects:
        if each["apiVersion"].startswith("ray.io/"):
            assert mistakes(each) == []
        elif each["apiVersion"].startswith("monitoring.coreos.com/"):
            assert operator_mistakes(each) == []
        elif each["kind"] in FOREIGN:
            assert each["apiVersion"] == FOREIGN[each["kind"]]
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_a_misspelled_key_would_be_noticed() -> None:
    (service, *_) = of_kind(rendered(values("native")), "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service | {"spec": service["spec"] | {"clusterIp": "None"}}, "1.37", strict=True)


def test_what_kuberay_refuses_would_be_noticed() -> None:
    (cluster,) = of_kind(rendered(values("kuberay-elastic")), "RayCluster")
    head = cluster["spec"]["headGroupSpec"]
    doubled = head | {"rayStartParams": head["rayStartParams"] | {"num-cpus": "0", "labels": "a=b"}}
    for changed, word in (
        ({"headGroupSpek": {}}, "headGroupSpek"),
        ({"headGroupSpec": doubled}, "head: resources stand in rayStartParams and in resources"),
        ({"headGroupSpec": doubled}, "head: labels stand in rayStartParams"),
        ({"rayVersion": "2.51.0"}, "authOptions.mode is token, which needs rayVersion 2.52.0"),
        ({"tlsOptions": {"enabled": True}}, "tlsOptions: needs a feature gate"),
    ):
        assert any(word in each for each in mistakes(cluster | {"spec": cluster["spec"] | changed}))
    (job,) = of_kind(rendered(values("kuberay-elastic")), "RayJob")
    assert mistakes(job | {"metadata": {"name": "a" * 48}}) == ["the name is longer than 47 characters"]


def test_what_the_prometheus_operator_refuses_would_be_noticed() -> None:
    (rules,) = of_kind(rendered(values("native-monitored")), "PrometheusRule")
    (group, *_) = rules["spec"]["groups"]
    for changed, word in (
        ({"groups": [group | {"ruless": []}]}, "ruless"),
        ({"groups": [group | {"rules": [{"record": "a:b", "alert": "A", "expr": "1"}]}]}, "valid under each"),
        ({"groups": [group | {"rules": [{"record": "a:b", "expr": "1", "for": "1m"}]}]}, "not valid under any"),
        ({"groups": [group | {"interval": "often"}]}, "often"),
    ):
        assert any(word in each for each in operator_mistakes(rules | {"spec": changed})), word


@EACH
def test_names_are_said_once_and_are_short_enough(path: Path) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered(path)]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


@pytest.mark.grid(keep=6)
@EACH
def test_rendering_twice_gives_the_same(path: Path) -> None:
    assert rendered(path) == rendered(path, "--debug")


@EACH
def test_what_is_mounted_is_the_block_of_the_values(path: Path, tmp_path: Path) -> None:
    objects = rendered(path)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["cluster"]
    own = yaml.safe_load(path.read_text()).get("cluster", {})
    assert yaml.safe_load(cluster_file(objects)) == merged(defaults, own)
    written = tmp_path / "written.yaml"
    written.write_text(yaml.safe_dump(merged(defaults, own)))
    assert mounted(objects, tmp_path) == load_spec(written)


def merged(below: Any, above: Any) -> Any:
    """As helm lays values over the chart's."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: merged(below[key], value) if key in below else value for key, value in above.items()}


def ours(pod: Object) -> list[Object]:
    """Containers that run our image."""
    return [each for each in pod["containers"] + pod.get("initContainers", []) if "diptych" in each.get("image", "")]


@EACH
def test_every_container_is_locked_down(path: Path) -> None:
    for name, pod in pods(rendered(path)):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        ours = [
            each for each in pod["containers"] + pod.get("initContainers", []) if "diptych" in each.get("image", "")
        ]
        assert ours
        for container in ours:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"]["drop"] == ["ALL"]
            assert set(security["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert "/tmp" in writable
            assert {mount["name"] for mount in container["volumeMounts"]} <= {each["name"] for each in pod["volumes"]}


@EACH
def test_every_pod_says_whether_ray_wants_a_token(path: Path) -> None:
    objects = rendered(path)
    for name, pod in pods(objects):
        if name.endswith(("-smoke", "-autoscaler")):
            continue  # they speak gRPC only
        for container in ours(pod):
            env = {each["name"]: each for each in container["env"]}
            if of_kind(objects, "RayCluster"):  # there the operator sets it
                assert "RAY_AUTH_MODE" not in env
            elif env["RAY_AUTH_MODE"]["value"] == "token":
                assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] in (
                    "release-diptych-ray",
                    "llm-ray",
                    "true-ray",
                    "123",
                    "ray-token",
                )
            else:
                assert "RAY_AUTH_TOKEN" not in env


def test_a_job_waits_for_the_file_that_it_was_made_for() -> None:
    objects = rendered(values("kuberay"))
    (job,) = of_kind(objects, "RayJob")
    digest = hashlib.sha256(cluster_file(objects).encode()).hexdigest()
    assert f'echo "{digest}  /etc/diptych/cluster.yaml" | sha256sum -c' in job["spec"]["entrypoint"]


def test_another_description_is_served_anew_and_another_number_of_gateways_is_not() -> None:
    def stamp(*options: str) -> Any:
        serve = next(each for each in of_kind(rendered(values("native"), *options), "Deployment") if is_serve(each))
        return serve["spec"]["template"]["metadata"]["annotations"]

    assert stamp() == stamp("--set", "pdb.enabled=false")
    assert stamp() == stamp("--set", "cluster.gateway.replicas=3")
    assert stamp() != stamp("--set", "cluster.gateway.max_requests=7")


def is_serve(each: Object) -> bool:
    return bool(each["metadata"]["name"].endswith("-serve"))
