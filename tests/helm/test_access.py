"""A guarded gateway in the chart: files are mounted and named, probes can ask it, its own clients get in."""

from itertools import pairwise
from typing import Any

import pytest

from cluster.cli.options import FILES
from tests.cli.commands import command_of
from tests.helm.chart import CHART, TOKEN, Object, of_kind, pods, refusal, rendered, values
from tests.helm.programs import run

pytestmark = pytest.mark.grid

HTTP = ("--set", "cluster.gateway.http_port=8000")
GUARDED = ("native-guarded", "native-mutual-tls", "kuberay-guarded")


def serving(objects: tuple[Object, ...]) -> tuple[list[str], Object]:
    """The words of the `diptych` that opens gateways, and the pod in which they run."""
    found = dict(pods(objects))
    for job in of_kind(objects, "RayJob"):
        return job["spec"]["entrypoint"].partition(" diptych ")[2].partition(" && ")[0].split(), found["head"]
    pod = found["release-diptych-gateway"]
    return pod["containers"][0]["command"][-1].partition("exec diptych ")[2].split(), pod


def secret_of(pod: Object, path: str) -> tuple[str, str]:
    """The Secret and the key in it that a container of ours finds at a path."""
    folder, _, name = path.rpartition("/")
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"] == folder]
    assert mount["readOnly"] and "subPath" not in mount, "a single file would not be renewed"
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    secret = volume["secret"]
    keys = {each["path"]: each["key"] for each in secret.get("items", [])}
    return secret["secretName"], keys[name] if keys else name


def probes(objects: tuple[Object, ...]) -> list[tuple[str, dict[str, Any]]]:
    container = serving(objects)[1]["containers"][0]
    asked = ("grpc", "httpGet", "tcpSocket")
    found = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    return [(kind, probe[kind]) for probe in found for kind in asked if kind in probe]


@pytest.mark.parametrize("name", GUARDED)
def test_serve_is_told_of_files_that_are_mounted(name: str) -> None:
    (command, *options), pod = serving(rendered(values(name)))
    given = {option: path for option, path in pairwise(options) if option in dict(FILES)}
    assert given.keys() <= {each for parameter in command_of(command).params for each in parameter.opts}
    found = {option: secret_of(pod, path) for option, path in given.items()}
    expected = {"--tls-cert-file": ("certificate", "tls.crt"), "--tls-key-file": ("certificate", "tls.key")}
    if name != "native-guarded":
        expected |= {"--tls-client-ca-file": ("clients", "ca.crt")}
    if name != "native-mutual-tls":
        expected |= {"--api-keys-file": ("keys", "keys" if name == "native-guarded" else "api-keys")}
    assert found == expected


def test_only_the_pod_of_gateways_has_the_key() -> None:
    for name in GUARDED:
        objects = rendered(values(name))
        holders = [pod for _, pod in pods(objects) if "certificate" in str(pod["volumes"])]
        assert serving(objects)[1] in holders
        for pod in holders:
            if pod != serving(objects)[1]:  # the smoke test, which wants the CA
                assert secret_of(pod, "/etc/diptych-ca/ca.crt") == ("certificate", "ca.crt")


def test_volumes_of_one_s_own_stay() -> None:
    _, pod = serving(rendered(values("native-guarded")))
    assert {"more", "access-tls", "access-keys"} <= {each["name"] for each in pod["volumes"]}


def test_probes_are_of_a_kind_that_the_kubelet_has() -> None:
    plain = probes(rendered(values("native")))
    assert [kind for kind, _ in plain] == ["grpc"] * 3
    https = probes(rendered(values("native-guarded")))
    assert https == [("httpGet", {"scheme": "HTTPS", "port": 8000, "path": path}) for path in OPEN_PATHS]
    assert probes(rendered(values("native-mutual-tls"))) == [("tcpSocket", {"port": 8000})] * 3
    without_http = rendered(values("native"), "--set", "gateway.tls.secret=certificate")
    assert probes(without_http) == [("tcpSocket", {"port": 50051})] * 3
    keys_only = rendered(values("native"), "--set", "gateway.auth.existingSecret=keys")
    assert [kind for kind, _ in probes(keys_only)] == ["grpc"] * 3, "health needs no key"


OPEN_PATHS = ("/health", "/ready", "/health")


@pytest.mark.parametrize("name", GUARDED)
def test_the_smoke_test_gets_in(name: str) -> None:
    (smoke,) = of_kind(rendered(values(name)), "Pod")
    pod = smoke["spec"]
    given = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert given.pop("DIPTYCH_ENDPOINT") == "grpcs://release-diptych.llm.svc:50051"
    assert given.pop("HOME") == "/tmp"
    found = {name: secret_of(pod, path) for name, path in given.items()}
    own = {"DIPTYCH_CERT": ("smoke", "tls.crt"), "DIPTYCH_CERT_KEY": ("smoke", "tls.key")}
    expected = {
        "native-guarded": {"DIPTYCH_CA": ("certificate", "ca.crt"), "DIPTYCH_KEY_FILE": ("keys", "keys")},
        "native-mutual-tls": own,
        "kuberay-guarded": own | {"DIPTYCH_CA": ("certificate", "ca.crt"), "DIPTYCH_KEY_FILE": ("keys", "api-keys")},
    }
    assert found == expected[name]
    known = {each.envvar for each in command_of("status").params}
    assert set(found) <= known and "DIPTYCH_ENDPOINT" in known


def test_prometheus_gets_in() -> None:
    (monitor,) = of_kind(rendered(values("native-guarded")), "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["scheme"] == "https" and endpoint["path"] == "/metrics"
    assert endpoint["tlsConfig"] == {
        "serverName": "release-diptych.llm.svc",
        "ca": {"secret": {"name": "certificate", "key": "ca.crt"}},
    }
    assert endpoint["authorization"] == {"credentials": {"name": "scraper", "key": "key"}}
    (monitor,) = of_kind(rendered(values("native-mutual-tls")), "ServiceMonitor")
    assert monitor["spec"]["endpoints"]
    for endpoint in monitor["spec"]["endpoints"]:
        assert "authorization" not in endpoint
        assert endpoint["tlsConfig"] == {
            "serverName": "release-diptych.llm.svc",
            "cert": {"secret": {"name": "scraper", "key": "tls.crt"}},
            "keySecret": {"name": "scraper", "key": "tls.key"},
        }


def test_routes_lead_to_http_and_nobody_takes_tls_for_clear_text() -> None:
    objects = rendered(values("native-guarded"))
    (route,) = of_kind(objects, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    (service,) = [each for each in of_kind(objects, "Service") if each["metadata"]["name"] == "release-diptych"]
    ports = {each["port"]: each for each in service["spec"]["ports"]}
    assert rule["backendRefs"] == [{"name": "release-diptych", "port": 8000}] and ports[8000]["name"] == "http-0"
    assert route["spec"]["hostnames"] == ["llm.example.com"] and route["spec"]["parentRefs"] == [{"name": "public"}]
    assert not any("appProtocol" in each for each in ports.values())


@pytest.mark.parametrize("name", GUARDED)
def test_the_notes_name_options_that_there_are(name: str) -> None:
    code, out, err = run(
        "helm", "install", "release", CHART, "--namespace", "llm", "--dry-run=client", "-f", values(name)
    )
    assert code == 0, err
    (line,) = [line for line in out.partition("NOTES:")[2].splitlines() if "diptych generate" in line]
    assert "--endpoint grpcs://release-diptych.llm.svc:50051" in line
    known = {each for parameter in command_of("generate").params for each in parameter.opts}
    assert {word for word in line.split() if word.startswith("--")} <= known


def test_an_unguarded_release_has_none_of_it() -> None:
    objects = rendered(values("native"))
    assert "access-" not in str(objects) and "--tls" not in str(objects) and not of_kind(objects, "HTTPRoute")


def with_http(*options: str) -> tuple[str, ...]:
    return (*HTTP, *(each for option in options for each in ("--set", option)))


TLS, CLIENTS, KEYS = "gateway.tls.secret=a", "gateway.tls.clientCASecret=b", "gateway.auth.existingSecret=c"
MONITOR = "metrics.serviceMonitor.enabled=true"
WRONG = {
    "a file in the block": (
        ("--set", "cluster.gateway.tls_cert_file=/tls.crt"),
        "cluster.gateway.tls_cert_file: the chart mounts the file and sets this path; write gateway.tls.secret",
    ),
    "keys in the block": (
        ("--set", "cluster.gateway.api_keys_file=/keys"),
        "cluster.gateway.api_keys_file: the chart mounts the file and sets this path; "
        "write gateway.auth.existingSecret",
    ),
    "authorities without a certificate": (
        with_http(CLIENTS),
        "gateway.tls.clientCASecret: client certificates need TLS; set gateway.tls.secret too",
    ),
    "a smoke test without a certificate": (
        with_http(TLS, CLIENTS),
        "smokeTest.clientSecret: the gateway requires a client certificate; name a kubernetes.io/tls Secret with "
        "one, or write smokeTest.enabled: false",
    ),
    "an autoscaler without a certificate": (
        (
            *with_http(TLS, CLIENTS, "poolAutoscaling.enabled=true", "smokeTest.enabled=false"),
            *("--set-json", 'cluster.pools=[{"name": "both", "role": "mixed", "replicas": {"min": 1, "max": 3}}]'),
        ),
        "poolAutoscaling.clientSecret: the gateway requires a client certificate; name a kubernetes.io/tls Secret "
        "with one",
    ),
    "Prometheus without a certificate": (
        with_http(TLS, CLIENTS, MONITOR, "smokeTest.enabled=false"),
        "metrics.serviceMonitor.clientSecret: the gateway requires a client certificate; name a kubernetes.io/tls "
        "Secret with one for Prometheus",
    ),
    "Prometheus without a key": (
        with_http(KEYS, MONITOR),
        "metrics.serviceMonitor.apiKey.name: /metrics needs an API key; name a Secret with the one that Prometheus "
        "sends",
    ),
    "a route without HTTP": (
        ("--set", "httpRoute.enabled=true", "--set-json", 'httpRoute.parentRefs=[{"name": "public"}]'),
        "httpRoute: the gateway has no HTTP port; write cluster.gateway.http_port: 8000",
    ),
    "an Ingress without HTTP": (
        ("--set", "httpIngress.enabled=true"),
        "httpIngress: the gateway has no HTTP port; write cluster.gateway.http_port: 8000",
    ),
    "a route without a Gateway": (
        with_http("httpRoute.enabled=true"),
        "httpRoute.parentRefs: is empty; name the Gateway, such as [{name: public}]",
    ),
    "a misspelled key": (
        ("--set", "gateway.tls.secretName=a"),
        "- at '/gateway/tls': additional properties 'secretName' not allowed",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_work_is_refused_in_one_line(wrong: str) -> None:
    options, words = WRONG[wrong]
    assert refusal(*TOKEN, *options).endswith(words)
