"""A release's life with the real helm: installed, tested, changed, taken back, removed; and what is refused.

The API server is our own (`api_server`): it says what Kubernetes takes, not what becomes of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.helm.api_server import Store, api_server
from tests.helm.chart import CHART, Object, rendered, values
from tests.helm.programs import run

pytestmark = pytest.mark.full

MODES = ("native", "kuberay", "external", "native-exposed", "native-autoscaled", "kuberay-elastic")
WITHOUT_FOREIGN = ("--set", "grpcRoute.enabled=false,podMonitor.enabled=false")
WORKLOADS = ("Deployment/", "StatefulSet/")
HOOKS = ("Pod/release-diptych-smoke",)


@dataclass(frozen=True)
class Kubernetes:
    """helm and kubectl against one server."""

    config: Path
    store: Store

    def run(self, program: str, *args: object) -> tuple[int, str, str]:
        return run(program, *args, "--namespace", "llm", "--kubeconfig", self.config)

    def helm(self, *args: object) -> str:
        code, out, err = self.run("helm", *args)
        assert code == 0, err
        return out

    def refused(self, *args: object) -> str:
        code, out, err = self.run("helm", *args)
        assert code != 0, out
        return err

    def contents(self) -> dict[str, Object]:
        """What it consists of, as far as helm says it."""
        found = [each for kind in self.store.kinds if kind.namespaced for each in self.store.all(kind, "llm", {})]
        return {named(each): said(each) for each in found if not named(each).startswith("Secret/sh.helm.release")}

    def objects(self) -> set[str]:
        """What the release consists of; helm's own Secrets left out."""
        return {each for each in self.store.names() if not each.startswith("Secret/sh.helm.release")}


def named(each: Object) -> str:
    return f"{each['kind']}/{each['metadata']['name']}"


def said(each: Object) -> Object:
    """Without what the server adds."""
    about = {key: each["metadata"].get(key) for key in ("labels", "annotations")}
    return about | {key: value for key, value in each.items() if key not in ("metadata", "status")}


def in_pods(contents: dict[str, Object]) -> dict[str, Object]:
    """What makes up the pods: ConfigMaps' data and templates."""
    found = {name: each["data"] for name, each in contents.items() if name.startswith("ConfigMap/")}
    found |= {name: each["spec"]["template"] for name, each in contents.items() if name.startswith(WORKLOADS)}
    return found | {name: each["spec"] for name, each in contents.items() if name.startswith("Ray")}


def connected(address: str, store: Store, folder: Path) -> Kubernetes:
    config = folder / "kubeconfig"
    cluster, context = {"server": address}, {"cluster": "here", "user": "nobody"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "here", "context": context}],
        "current-context": "here",
    }
    config.write_text(yaml.safe_dump(document))
    return Kubernetes(config, store)


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Kubernetes]:
    with api_server(kuberay=True) as (address, store):
        yield connected(address, store, tmp_path)


def expected(name: str, *options: str) -> set[str]:
    found = rendered(values(name), *options)
    return {named(each) for each in found} - set(HOOKS)


@pytest.mark.parametrize("name", MODES)
def test_a_release_lives_and_leaves_nothing_behind(kubernetes: Kubernetes, name: str) -> None:
    options = ("-f", values(name), *WITHOUT_FOREIGN)
    waiting = ("--wait", "--timeout", "30s")
    kubernetes.helm("install", "release", CHART, "--create-namespace", *options, *waiting)
    first = kubernetes.contents()
    assert first.keys() == expected(name, *WITHOUT_FOREIGN)
    kubernetes.helm("test", "release")
    changed = "cluster.gateway.max_requests=7,podDefaults.podAnnotations.changed=yes"
    kubernetes.helm("upgrade", "release", CHART, *options, "--set", changed, *waiting)
    (before, after) = json.loads(kubernetes.helm("history", "release", "-o", "json"))
    assert (before["status"], after["status"]) == ("superseded", "deployed")
    assert kubernetes.objects() == expected(name, *WITHOUT_FOREIGN, "--set", changed)
    wanted = {named(each): said(each) for each in rendered(values(name), *WITHOUT_FOREIGN, "--set", changed)}
    assert in_pods(kubernetes.contents()) == in_pods(wanted) != in_pods(first)
    kubernetes.helm("rollback", "release", "1", *waiting)
    assert kubernetes.contents() == first
    kubernetes.helm("uninstall", "release", *waiting)
    assert kubernetes.store.names() == []


def test_weights_outlive_their_release(kubernetes: Kubernetes) -> None:
    options = ("-f", values("native-own-claim"), "--create-namespace")
    for _ in range(2):  # the second one finds the claim of the first
        kubernetes.helm("install", "release", CHART, *options)
        kubernetes.helm("uninstall", "release")
        assert kubernetes.objects() == {"PersistentVolumeClaim/release-diptych-models"}
    (claim,) = kubernetes.contents().values()
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "50Gi"}},
    }


def test_a_pool_that_is_taken_out_takes_its_pods_along(kubernetes: Kubernetes) -> None:
    kubernetes.helm("install", "release", CHART, "--create-namespace", "-f", values("native-elastic"))
    assert "StatefulSet/release-diptych-spare" in kubernetes.objects()
    document = yaml.safe_load(values("native-elastic").read_text())
    left = json.dumps([pool for pool in document["cluster"]["pools"] if pool["name"] != "spare"])
    kubernetes.helm("upgrade", "release", CHART, "-f", values("native-elastic"), "--set-json", f"cluster.pools={left}")
    assert not any("spare" in each for each in kubernetes.objects())


def test_an_upgrade_leaves_the_pods_that_others_ask_for(kubernetes: Kubernetes) -> None:
    options = ("-f", values("native-autoscaled"))
    kubernetes.helm("install", "release", CHART, "--create-namespace", *options)
    kind = next(each for each in kubernetes.store.kinds if each.name == "StatefulSet")
    for name, pods in (("release-diptych-decode", 4), ("release-diptych-fixed", 5)):
        patch = {"metadata": {"name": name}, "spec": {"replicas": pods}}
        kubernetes.store.write(kind, "llm", name, patch, how="merge", dry=False)
    kubernetes.helm("upgrade", "release", CHART, *options, "--set", "podDefaults.podAnnotations.changed=yes")
    found = {each["metadata"]["name"]: each["spec"]["replicas"] for each in kubernetes.store.all(kind, "llm", {})}
    assert (found["release-diptych-decode"], found["release-diptych-prefill"]) == (4, 1)
    assert found["release-diptych-fixed"] == 2, "that one is helm's"


def test_notes_name_the_three_ways_to_ask(kubernetes: Kubernetes) -> None:
    notes = kubernetes.helm("install", "release", CHART, "--create-namespace", "-f", values("native"))
    assert 'diptych generate "Why is the sea salty?" --endpoint release-diptych.llm:50051' in notes
    assert "kubectl -n llm port-forward svc/release-diptych 50051:50051" in notes
    assert (
        "ray job submit --address http://127.0.0.1:8265 -- diptych status --endpoint release-diptych.llm:50051" in notes
    )


def test_what_kubernetes_would_refuse_fails_the_install(kubernetes: Kubernetes) -> None:
    wrong = ("--set", "podDefaults.podSecurityContext.runAsUsr=7")
    words = kubernetes.refused("install", "release", CHART, "--create-namespace", "-f", values("native"), *wrong)
    assert "is invalid" in words and "runAsUsr" in words


def test_what_kuberay_would_refuse_fails_the_install(kubernetes: Kubernetes) -> None:
    wrong = ("--set", "ray.version=2.51.0")
    words = kubernetes.refused("install", "release", CHART, "--create-namespace", "-f", values("kuberay"), *wrong)
    assert "authOptions.mode is token, which needs rayVersion 2.52.0" in words


def test_without_kuberay_the_missing_definition_is_named(tmp_path: Path) -> None:
    with api_server(kuberay=False) as (address, store):
        kubernetes = connected(address, store, tmp_path)
        words = kubernetes.refused("install", "release", CHART, "--create-namespace", "-f", values("kuberay"))
        assert 'no matches for kind "RayCluster" in version "ray.io/v1"' in words
        assert kubernetes.objects() == set()


def test_a_refused_upgrade_leaves_the_release_as_it_was(kubernetes: Kubernetes) -> None:
    kubernetes.helm("install", "release", CHART, "--create-namespace", "-f", values("native"))
    first = kubernetes.objects()
    words = kubernetes.refused("upgrade", "release", CHART, "-f", values("native"), "--set", "cluster.modle=x")
    assert "additional properties 'modle' not allowed" in words
    assert kubernetes.objects() == first
    assert [each["status"] for each in json.loads(kubernetes.helm("history", "release", "-o", "json"))] == ["deployed"]


def test_a_dry_run_asks_the_server_and_leaves_nothing(kubernetes: Kubernetes) -> None:
    kubernetes.helm("install", "other", CHART, "--create-namespace", "-f", values("external"))
    before = kubernetes.store.names()
    kubernetes.helm("install", "release", CHART, "-f", values("native"), "--dry-run=server")
    assert kubernetes.store.names() == before


def test_kubectl_takes_what_helm_renders(kubernetes: Kubernetes, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(yaml.safe_dump_all(rendered(values("kuberay"))))
    for _ in range(2):  # again, it changes nothing
        code, _, err = kubernetes.run("kubectl", "apply", "--server-side", "-f", manifest)
        assert code == 0, err
    assert "RayCluster/release-diptych" in kubernetes.objects()
    code, out, _ = kubernetes.run("kubectl", "get", "rayclusters", "-o", "name")
    assert (code, out.strip()) == (0, "raycluster.ray.io/release-diptych")
