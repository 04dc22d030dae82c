"""How pods end and follow each other: pools are emptied first, gateways are never fewer, a cluster is served once."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import command_of
from tests.helm.chart import Object, mounted, of_kind, rendered, values

pytestmark = pytest.mark.full

NATIVE = ("native", "native-exposed", "native-gpu", "external")


def deployment(objects: tuple[Object, ...], ending: str) -> Object:
    (found,) = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"].endswith(ending)]
    return found


def container(workload: Object) -> Object:
    (first, *_) = workload["spec"]["template"]["spec"]["containers"]
    found: Object = first
    return found


def called(script: str) -> tuple[str, dict[str, Any]]:
    """The `diptych` command at the end of a script, as it understands its options."""
    words = shlex.split(script)
    name, *options = words[words.index("diptych") + 1 :]
    command = command_of(name)
    return name, command.make_context(name, options).params


def pools(objects: tuple[Object, ...]) -> list[tuple[Object, Object]]:
    """Pod and container of every pool."""
    found = [
        each["spec"]["template"]["spec"] for each in of_kind(objects, "StatefulSet") if "diptych/pool" in labels(each)
    ]
    for each in of_kind(objects, "RayCluster"):
        found += [group["template"]["spec"] for group in each["spec"]["workerGroupSpecs"]]
    return [(pod, pod["containers"][0]) for pod in found]


def labels(workload: Object) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("name", ["native", "native-gpu", "native-every-setting", "kuberay"])
def test_a_pod_of_a_pool_is_emptied_before_it_ends(name: str) -> None:
    for pod, first in pools(rendered(values(name))):
        hook = first["lifecycle"]["preStop"]["exec"]["command"]
        if hook[0] == "/bin/sh":  # the script's $0 and $1
            assert hook[2].startswith('RAY_ADDRESS="$0" ') and f"--address={hook[3]}" in first["args"]
            hook = shlex.split(hook[2].replace("$1", hook[4]))
        command, options = called(shlex.join(hook))
        assert (command, options["node"]) == ("leave", None)
        assert options["deadline_s"] == pod["terminationGracePeriodSeconds"] - 20


@pytest.mark.parametrize("name", NATIVE)
def test_gateways_join_and_roll_with_none_less(name: str, tmp_path: Path) -> None:
    objects = rendered(values(name))
    spec, gateways = mounted(objects, tmp_path), deployment(objects, "-gateway")
    assert gateways["spec"]["replicas"] == spec.gateway.replicas
    assert gateways["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    command, options = called(container(gateways)["command"][2])
    assert (command, options["cluster"]) == ("gateway", spec.name)
    assert options["wait_s"] >= spec.health.place_timeout_s + spec.health.start_timeout_s
    pod = gateways["spec"]["template"]["spec"]
    sleeps_s = int(container(gateways)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleeps_s + options["grace_s"] + 10 == pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", NATIVE)
def test_a_cluster_is_served_once_and_without_gateways(name: str) -> None:
    serve = deployment(rendered(values(name)), "-serve")
    assert (serve["spec"]["replicas"], serve["spec"]["strategy"]) == (1, {"type": "Recreate"})
    command, options = called(container(serve)["command"][2])
    assert (command, options["file"], options["no_gateways"]) == ("serve", "/etc/diptych/cluster.yaml", True)


def test_an_autoscaler_and_nobody_else_says_how_many_gateways_there_are() -> None:
    objects = rendered(values("native-scaled-gateways"))
    (scaler,), gateways = of_kind(objects, "HorizontalPodAutoscaler"), deployment(objects, "-gateway")
    assert "replicas" not in gateways["spec"]
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", gateways["metadata"]["name"])
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 6)
    (metric,) = scaler["spec"]["metrics"]
    measured = metric["containerResource"]
    assert measured["container"] == container(gateways)["name"]
    assert measured["target"] == {"type": "Utilization", "averageUtilization": 60}
    assert measured["name"] in container(gateways)["resources"]["requests"], "of which it is a share"
    budgets = [each["metadata"]["name"] for each in of_kind(objects, "PodDisruptionBudget")]
    assert "release-diptych-gateway" in budgets
    assert not of_kind(rendered(values("native")), "HorizontalPodAutoscaler")


def test_several_gateways_have_a_disruption_budget() -> None:
    def budgets(*options: str) -> list[str]:
        found = of_kind(rendered(values("native"), *options), "PodDisruptionBudget")
        return [each["metadata"]["name"] for each in found if each["metadata"]["name"].endswith("gateway")]

    assert not budgets()
    assert budgets("--set", "cluster.gateway.replicas=2") == ["release-diptych-gateway"]
