"""Names that Kubernetes takes and YAML would read as something else, and addresses in brackets."""

import shlex
import socket
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tests.helm.chart import CHART, TOKEN, of_kind, pods, refusal, rendered, values
from tests.helm.programs import run

pytestmark = pytest.mark.full


@pytest.mark.parametrize("release", ["1", "true", "null"])
def test_a_release_may_be_called_anything(release: str) -> None:
    code, out, err = run("helm", "template", release, CHART, "-f", values("native-odd-names"))
    assert code == 0, err
    for each in filter(None, yaml.load_all(out, Loader=yaml.CSafeLoader)):
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == release
        if "." not in each["apiVersion"] or each["apiVersion"].startswith("networking.k8s.io"):
            kubernetes_validate.validate(each, "1.37", strict=True)


def test_a_host_may_begin_with_a_star() -> None:
    (ingress,) = of_kind(rendered(values("native-odd-names")), "Ingress")
    assert ingress["spec"]["rules"][0]["host"] == "*.example.com"
    assert ingress["spec"]["tls"] == [{"secretName": "12", "hosts": ["*.example.com"]}]


def test_a_pool_may_be_called_by_a_number() -> None:
    stateful = of_kind(rendered(values("native-odd-names")), "StatefulSet")
    assert [each["metadata"]["name"] for each in stateful] == ["true-head", "true-1", "true-2e3"]
    assert stateful[1]["spec"]["selector"]["matchLabels"]["diptych/pool"] == "1"


def test_pods_find_a_head_with_an_ipv6_address() -> None:
    found = dict(pods(rendered(values("external-ipv6"))))
    for pod in (found["release-diptych-serve"], found["release-diptych-gateway"]):
        assert pod["containers"][0]["args"][0] == "[fd00::1]:6379"
        wait = pod["initContainers"][0]["command"]
        assert wait[-1] == "[fd00::1]:6379"
    words = shlex.split(wait[2].splitlines()[0])
    connect = words[words.index("-c") + 1]
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"[127.0.0.1]:{head.getsockname()[1]}"  # brackets are what matters; not every machine has IPv6
        subprocess.run([sys.executable, "-IS", "-c", connect, address], check=True)


def test_a_key_of_a_secret_is_one_word_of_the_command() -> None:
    assert "'/gateway/auth/key': '$(id)' does not match pattern" in refusal(*TOKEN, "--set", "gateway.auth.key=$(id)")
