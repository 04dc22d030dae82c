"""Whoever is let in finds a gateway: Services, routes, probes, policies and monitors point at what there is."""

import json
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, Object, mounted, of_kind, rendered, values
from tests.helm.programs import run

pytestmark = pytest.mark.full


def door(objects: tuple[Object, ...]) -> Object:
    """The Service that clients ask."""
    (found,) = [each for each in of_kind(objects, "Service") if each["spec"].get("clusterIP") != "None"]
    return found


def ports(container: Object) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def gateway(objects: tuple[Object, ...]) -> tuple[dict[str, str], Object]:
    """Labels and container of the pod in which gateways listen."""
    for each in of_kind(objects, "RayCluster"):
        template = each["spec"]["headGroupSpec"]["template"]
        own = {"ray.io/cluster": each["metadata"]["name"], "ray.io/node-type": "head"}  # which the operator adds
        return template["metadata"]["labels"] | own, template["spec"]["containers"][0]
    template = gateways(objects)["spec"]["template"]
    return template["metadata"]["labels"], template["spec"]["containers"][0]


def gateways(objects: tuple[Object, ...]) -> Object:
    (found,) = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"].endswith("-gateway")]
    return found


@pytest.mark.parametrize(
    "name", ["native", "native-elastic", "native-exposed", "kuberay", "kuberay-gateways", "external"]
)
def test_the_service_leads_to_every_gateway(name: str, tmp_path: Any) -> None:
    objects = rendered(values(name))
    service, (labels, container) = door(objects), gateway(objects)
    spec = mounted(objects, tmp_path).gateway
    assert service["spec"]["selector"].items() <= labels.items()
    firsts = [spec.grpc_port] if spec.http_port is None else [spec.grpc_port, spec.http_port]
    is_one_pod = bool(of_kind(objects, "RayCluster"))  # elsewhere each has a pod of its own
    wanted = [first + index for index in range(spec.replicas if is_one_pod else 1) for first in firsts]
    assert is_one_pod or gateways(objects)["spec"]["replicas"] == spec.replicas
    assert [each["targetPort"] for each in service["spec"]["ports"]] == wanted
    assert set(wanted) <= set(ports(container).values())
    assert len(set(ports(container).values())) == len(container["ports"])


def test_only_one_kind_of_pod_stands_behind_the_service() -> None:
    objects = rendered(values("native"))
    selector = door(objects)["spec"]["selector"]
    for each in of_kind(objects, "StatefulSet") + of_kind(objects, "Pod"):
        labels = each.get("spec", {}).get("template", each)["metadata"]["labels"]
        assert not selector.items() <= labels.items()


def test_routes_lead_to_the_service() -> None:
    objects = rendered(values("native-exposed"))
    service = door(objects)
    (ingress, _), (route,) = of_kind(objects, "Ingress"), of_kind(objects, "GRPCRoute")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {
        "name": service["metadata"]["name"],
        "port": {"name": service["spec"]["ports"][0]["name"]},
    }
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend == {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert (
        route["spec"]["hostnames"] == ["llm.example.com"] and ingress["spec"]["tls"][0]["secretName"] == "certificate"
    )


def test_routes_lead_to_every_gateway_of_a_ray_cluster() -> None:
    objects = rendered(values("kuberay-gateways"))
    service = door(objects)
    wanted = {
        kind: [each["port"] for each in service["spec"]["ports"] if kind in each["name"]] for kind in ("grpc", "http")
    }
    assert wanted == {"grpc": [50061, 50062, 50063], "http": [8000, 8001, 8002]}
    for kind, route in (("grpc", "GRPCRoute"), ("http", "HTTPRoute")):
        (found,) = of_kind(objects, route)
        (rule,) = found["spec"]["rules"]
        name = service["metadata"]["name"]
        assert rule["backendRefs"] == [{"name": name, "port": port} for port in wanted[kind]]


def test_every_gateway_of_a_ray_cluster_is_scraped_and_let_in() -> None:
    objects = rendered(values("kuberay-gateways"))
    (monitor,), (policy,) = of_kind(objects, "ServiceMonitor"), of_kind(objects, "NetworkPolicy")
    targets = {port["name"]: port["targetPort"] for port in door(objects)["spec"]["ports"]}
    assert [targets[each["port"]] for each in monitor["spec"]["endpoints"]] == [8000, 8001, 8002]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= door(objects)["metadata"]["labels"].items()
    _, clients, scrapers = policy["spec"]["ingress"]
    assert clients["ports"] == [{"port": 50051, "endPort": 50053}, {"port": 8000, "endPort": 8002}]
    assert {"port": 8000, "endPort": 8002} in scrapers["ports"]


@pytest.mark.parametrize("name", ["native", "external"])
def test_a_model_may_load_as_long_as_the_cluster_allows(name: str, tmp_path: Any) -> None:
    objects = rendered(values(name))
    health = mounted(objects, tmp_path).health
    _, container = gateway(objects)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > health.place_timeout_s + health.start_timeout_s
    assert gateways(objects)["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_probes_ask_ports_that_are_open() -> None:
    for each in of_kind(rendered(values("native")), "StatefulSet"):
        container = each["spec"]["template"]["spec"]["containers"][0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports(container)


def test_a_policy_lets_pods_clients_and_scrapers_in() -> None:
    objects = rendered(values("native-exposed"))
    (policy,) = of_kind(objects, "NetworkPolicy")
    own, clients, scrapers = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    assert clients["from"] == [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}]
    assert clients["ports"] == [{"port": 50051, "endPort": 50051}, {"port": 8000, "endPort": 8000}]
    assert scrapers == {"ports": [{"port": 8080}]}
    for each in of_kind(objects, "StatefulSet") + of_kind(objects, "Deployment"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_monitor_finds_rays_metrics_on_every_pod() -> None:
    objects = rendered(values("native-exposed"))
    (monitor,) = of_kind(objects, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for each in of_kind(objects, "StatefulSet") + of_kind(objects, "Deployment"):
        template = each["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        container = template["spec"]["containers"][0]
        assert f"--metrics-export-port={ports(container)[endpoint['port']]}" in container["args"]


def test_the_service_monitor_finds_the_metrics_of_every_gateway() -> None:
    objects = rendered(values("native-monitored"))
    (monitor,) = of_kind(objects, "ServiceMonitor")
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = [each for each in of_kind(objects, "Service") if chosen <= each["metadata"]["labels"].items()]
    _, container = gateway(objects)
    targets = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert [targets[each["port"]] for each in monitor["spec"]["endpoints"]] == [8000]
    assert {8000} <= {port["containerPort"] for port in container["ports"]}
    assert {(each["path"], each["interval"]) for each in monitor["spec"]["endpoints"]} == {("/metrics", "5s")}


def test_scrapers_are_let_in_without_everybody_else() -> None:
    enabled = ("--set", "networkPolicy.enabled=true", "--set-json", 'networkPolicy.clients=[{"podSelector": {}}]')
    prometheus = ("--set-json", 'networkPolicy.scrapers=[{"namespaceSelector": {}}]')
    (policy,) = of_kind(rendered(values("native-monitored"), *enabled, *prometheus), "NetworkPolicy")
    let_in = [(each["port"], rule["from"]) for rule in policy["spec"]["ingress"][1:] for each in rule["ports"]]
    clients: list[dict[str, Any]] = [{"podSelector": {}}]
    scrapers: list[dict[str, Any]] = [{"namespaceSelector": {}}]
    assert let_in == [(50051, clients), (8000, clients), (8080, scrapers), (8000, scrapers)]


def test_scrapers_may_reach_what_the_service_monitor_names() -> None:
    (policy,) = of_kind(rendered(values("native-monitored"), "--set", "networkPolicy.enabled=true"), "NetworkPolicy")
    *_, scrapers = policy["spec"]["ingress"]
    assert scrapers == {"ports": [{"port": 8080}, {"port": 8000, "endPort": 8000}]}


def test_dashboard_and_rules_are_the_files_of_the_chart() -> None:
    objects = rendered(values("native-monitored"))
    (rules,) = of_kind(objects, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    (board,) = [each for each in of_kind(objects, "ConfigMap") if "diptych.json" in each["data"]]
    assert json.loads(board["data"]["diptych.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())
    assert board["metadata"]["labels"].items() >= {"grafana_dashboard": "1", "team": "llm"}.items()
    assert board["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    assert rules["metadata"]["labels"]["release"] == "prometheus"


def test_nothing_of_the_operator_is_there_unasked() -> None:
    objects = rendered(values("native"))
    assert not [each for each in objects if each["apiVersion"].startswith("monitoring.coreos.com/")]
    assert len(of_kind(objects, "ConfigMap")) == 1


def test_disruption_budgets_hold_one_pool_each() -> None:
    objects = rendered(values("native-gpu"))
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind(objects, "StatefulSet")
    }
    held = {}
    for budget in of_kind(objects, "PodDisruptionBudget"):
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        held[budget["spec"]["maxUnavailable"]] = [name for name, labels in pods.items() if chosen <= labels.items()]
    assert held == {1: ["release-diptych-h100"], 2: ["release-diptych-a100"]}


def test_a_packaged_chart_has_all_files(tmp_path: Any) -> None:
    code, _, err = run("helm", "package", CHART, "--destination", tmp_path)
    assert code == 0, err
    (package,) = tmp_path.glob("diptych-*.tgz")
    code, out, err = run("helm", "template", "release", package, "-f", values("native-monitored"))
    assert code == 0 and "kind: StatefulSet" in out, err
    assert "alert: DiptychGatewayDown" in out and "diptych_ledger_seconds_sum" in out


def test_http_has_an_ingress_of_its_own() -> None:
    objects = rendered(values("native-exposed"))
    service, (grpc, http) = door(objects), of_kind(objects, "Ingress")
    assert http["metadata"]["name"] == f"{grpc['metadata']['name']}-http"
    assert http["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/proxy-read-timeout": "600"}
    (rule,) = http["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    targets = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert (backend["name"], targets[backend["port"]["name"]]) == (service["metadata"]["name"], 8000)
    assert rule["host"] == "api.example.com" and http["spec"]["ingressClassName"] == "nginx"
    assert http["spec"]["tls"] == [{"secretName": "api-certificate", "hosts": ["api.example.com"]}]
