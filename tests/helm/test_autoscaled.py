"""Pods of pools that follow their workers: who may say how many there are, and what the pod that does it is given."""

from pathlib import Path
from typing import Any

import pytest

from cluster.control.autoscaler.pods import scaled_pools
from tests.cli.commands import command_of
from tests.helm.chart import CHART, Object, mounted, of_kind, rendered, values
from tests.helm.programs import run
from tests.helm.test_access import secret_of

pytestmark = pytest.mark.full


def autoscaler(objects: tuple[Object, ...]) -> Object:
    (found,) = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"].endswith("-autoscaler")]
    return found


def replicas(objects: tuple[Object, ...]) -> dict[str, int | None]:
    found = of_kind(objects, "StatefulSet")
    return {each["metadata"]["name"]: each["spec"].get("replicas") for each in found}


def called(objects: tuple[Object, ...]) -> dict[str, Any]:
    """The command, as it understands its options; any file stands for the mounted one."""
    (container, *_) = autoscaler(objects)["spec"]["template"]["spec"]["containers"]
    program, name, *options = container["command"] + container["args"]
    assert program == "diptych" and "--file=/etc/diptych/cluster.yaml" in options
    there = [f"--file={__file__}" if each.startswith("--file=") else each for each in options]
    return command_of(name).make_context(name, there).params


@pytest.mark.parametrize("name", ["native-autoscaled", "native-autoscaled-by-others"])
def test_helm_says_the_number_of_pods_only_where_nobody_else_does(name: str, tmp_path: Path) -> None:
    objects = rendered(values(name))
    free = {f"release-diptych-{pool.name}" for pool in scaled_pools(mounted(objects, tmp_path))}
    assert free and {each for each, count in replicas(objects).items() if count is None} == free


def test_without_it_there_are_pods_for_the_most_workers() -> None:
    objects = rendered(values("native-autoscaled"), "--set", "poolAutoscaling.enabled=false")
    assert (replicas(objects)["release-diptych-prefill"], replicas(objects)["release-diptych-decode"]) == (3, 4)
    assert not of_kind(objects, "Role") and "autoscaler" not in {each["metadata"]["name"] for each in objects}


def test_the_command_names_the_stateful_sets_that_it_may_scale(tmp_path: Path) -> None:
    objects = rendered(values("native-autoscaled"))
    given = called(objects)
    named = {f"{given['prefix']}-{pool.name}" for pool in scaled_pools(mounted(objects, tmp_path))}
    (role,), (binding,) = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
    (rule,) = role["rules"]
    assert (rule["apiGroups"], rule["resources"], rule["verbs"]) == (["apps"], ["statefulsets/scale"], ["get", "patch"])
    assert set(rule["resourceNames"]) == named <= replicas(objects).keys()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pod = autoscaler(objects)["spec"]["template"]["spec"]
    (subject,) = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "llm"}
    assert pod["serviceAccountName"] in [each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")]
    assert given["window_s"] == 45
    (container, *_) = pod["containers"]
    assert {"name": "health", "containerPort": given["health_port"]} in container["ports"]
    assert {each["httpGet"]["port"] for each in (container["readinessProbe"], container["livenessProbe"])} == {"health"}


def test_no_other_pod_has_a_token_of_the_api_server() -> None:
    objects = rendered(values("native-autoscaled"))
    having = {
        each["metadata"]["name"]: template["spec"]["automountServiceAccountToken"]
        for each in objects
        if (template := each.get("spec", {}).get("template") or (each if each["kind"] == "Pod" else None))
    }
    assert [name for name, mounts in having.items() if mounts] == ["release-diptych-autoscaler"]
    assert all(each["automountServiceAccountToken"] is False for each in of_kind(objects, "ServiceAccount"))


def test_it_gets_in_where_gateways_are_guarded() -> None:
    pod = autoscaler(rendered(values("native-autoscaled")))["spec"]["template"]["spec"]
    (container, *_) = pod["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given.pop("DIPTYCH_ENDPOINT") == "grpcs://release-diptych.llm.svc:50051"
    assert (given.pop("HOME"), given.pop("LANG")) == ("/tmp", "C")
    assert {name: secret_of(pod, path) for name, path in given.items()} == {
        "DIPTYCH_CA": ("certificate", "ca.crt"),
        "DIPTYCH_CERT": ("autoscaler", "tls.crt"),
        "DIPTYCH_CERT_KEY": ("autoscaler", "tls.key"),
        "DIPTYCH_KEY_FILE": ("keys", "keys"),
    }
    assert given.keys() <= {each.envvar for each in command_of("autoscaler").params}
    assert pod["nodeSelector"] == {"pool": "small"} and [each["name"] for each in pod["containers"]][1:] == ["logs"]


def test_a_policy_lets_it_reach_the_gateway_and_keeps_it_from_nothing() -> None:
    objects = rendered(values("native-autoscaled"))
    (policy,) = of_kind(objects, "NetworkPolicy")
    labels = autoscaler(objects)["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert {"podSelector": policy["spec"]["podSelector"]} in policy["spec"]["ingress"][0]["from"]
    assert policy["spec"]["policyTypes"] == ["Ingress"], "so that the API server can be reached"
    for each in of_kind(objects, "Service") + of_kind(objects, "PodDisruptionBudget"):
        chosen = each["spec"]["selector"].get("matchLabels", each["spec"]["selector"])
        assert not chosen.items() <= labels.items(), "it is no gateway, and of no pool"
    assert labels["team"] == "llm"


def test_an_account_of_one_s_own_needs_no_role() -> None:
    objects = rendered(values("native-autoscaled"), "--set", "poolAutoscaling.serviceAccountName=mine")
    assert autoscaler(objects)["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert not of_kind(objects, "Role") and not of_kind(objects, "RoleBinding")


def test_nothing_of_it_is_there_where_others_do_it() -> None:
    objects = rendered(values("native-autoscaled-by-others"))
    assert not of_kind(objects, "Role") and not of_kind(objects, "RoleBinding")
    assert [each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")] == ["release-diptych"]
    assert len(of_kind(objects, "Deployment")) == 2


def test_other_pools_begin_the_autoscaler_anew() -> None:
    def stamp(*options: str) -> Any:
        return autoscaler(rendered(values("native-autoscaled"), *options))["spec"]["template"]["metadata"]

    assert stamp() == stamp("--set", "pdb.enabled=false") != stamp("--set", "cluster.pools[2].replicas=3")


def test_the_notes_say_which_pools_scale() -> None:
    def notes(name: str, *options: str) -> str:
        install = ("helm", "install", "release", CHART, "--namespace", "llm", "--dry-run=client", "-f", values(name))
        code, out, err = run(*install, *options)
        assert code == 0, err
        return out.partition("NOTES:")[2]

    received = notes("native-autoscaled")
    assert (
        "Pods of prefill, decode follow" in received
        and "kubectl -n llm logs deploy/release-diptych-autoscaler" in received
    )
    assert "Pods of decode follow the scale of their StatefulSets" in notes("native-autoscaled-by-others")
    assert "follow" not in notes("native-autoscaled", "--set", "poolAutoscaling.enabled=false")


def test_a_label_of_one_s_own_stands_once() -> None:
    """On the smoke test's pod, which has more of the chart's labels than others."""
    options = ("--set", r"podDefaults.podLabels.app\.kubernetes\.io/version=mine")
    install = ("helm", "template", "release", CHART, "--namespace", "llm", "-f", values("native"))
    code, out, err = run(*install, *options, "--show-only", "templates/tests/smoke.yaml")
    assert code == 0, err
    assert out.count("app.kubernetes.io/version") == 1 and "app.kubernetes.io/version: mine" in out
