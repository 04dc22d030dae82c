"""Wrong values are refused in one line that names the place."""

import pytest

from tests.helm.chart import TOKEN, of_kind, refusal, rendered, values


def pools(*described: str) -> tuple[str, str]:
    return "--set-json", f"cluster.pools=[{','.join(described)}]"


PREFILL = '{"name": "prefill", "role": "prefill"}'
DECODE = '{"name": "decode", "role": "decode"}'
ELASTIC = '{"name": "both", "role": "mixed", "replicas": {"min": 1, "max": 3}}'
WRONG = {
    "a misspelt key": (("--set", "cluster.modle=x"), "- at '/cluster': additional properties 'modle' not allowed"),
    "a misspelt key of a pool": (
        pools('{"name": "both", "role": "mixed", "replica": 2}'),
        "- at '/cluster/pools/0': additional properties 'replica' not allowed",
    ),
    "a misspelt setting of pods": (
        ("--set", "pools.decode.nodeselector.a=b"),
        "- at '/pools/decode': additional properties 'nodeselector' not allowed",
    ),
    "an unknown mode": (("--set", "mode=nativ"), "- at '/mode': value must be one of 'native', 'kuberay', 'external'"),
    "a word for a number": (
        ("--set", "cluster.gateway.max_requests=many"),
        "- at '/cluster/gateway/max_requests': got string, want integer",
    ),
    "a floor above the pools": (
        ("--set", "cluster.elastic.mode=act,cluster.elastic.floors.decode=3"),
        "cluster.elastic.floors.decode is 3, the pools have 2 workers; lower the floor",
    ),
    "settings of a pool that is not": (
        ("--set", "pools.prefil.shmSize=1Gi"),
        "pools.prefil: cluster.pools has no such pool, there are prefill, decode",
    ),
    "no decode pool": (
        pools(PREFILL),
        "cluster.pools: there is no decode pool (and no mixed one), so no request could finish",
    ),
    "two pools of a name": (pools(PREFILL, DECODE, DECODE), "cluster.pools: two are called decode; names must differ"),
    "a pool of the chart's own name": (
        pools('{"name": "head", "role": "mixed"}'),
        "cluster.pools: head is what the chart calls pods of its own; give the pool another name",
    ),
    "no worker": (
        pools('{"name": "both", "role": "mixed", "replicas": 0}'),
        "cluster.pools: there is no worker in any of them; give one at least 1 replica",
    ),
    "bounds the wrong way round": (
        pools('{"name": "both", "role": "mixed", "replicas": {"min": 3, "max": 1}}'),
        "cluster.pools: both has replicas.min above replicas.max",
    ),
    "a door that nobody reaches": (
        ("--set", "cluster.gateway.host=127.0.0.1"),
        "cluster.gateway.host: nobody outside of the pod would reach the gateway; write 0.0.0.0",
    ),
    "a monitor without a door to scrape": (
        ("--set", "metrics.serviceMonitor.enabled=true"),
        "metrics.serviceMonitor: gateways tell their metrics over HTTP; write cluster.gateway.http_port: 8000",
    ),
    "a port that nobody knows": (
        ("--set", "cluster.gateway.grpc_port=0"),
        "cluster.gateway.grpc_port: a Service needs a port that is known; write 50051",
    ),
    "HTTP where Ray's metrics are": (
        ("--set", "cluster.gateway.http_port=8080"),
        "cluster.gateway.http_port: gateway 0 would listen on 8080, the port of Ray's metrics in the same pod; "
        "write another",
    ),
    "gRPC where Ray's agent is": (
        ("--set", "cluster.gateway.grpc_port=52365"),
        "cluster.gateway.grpc_port: gateway 0 would listen on 52365, the port of Ray's agent in the same pod; "
        "write another",
    ),
    "a second gateway where Ray's dashboard is": (
        ("--set", "mode=kuberay,cluster.gateway.http_port=8264,cluster.gateway.replicas=2"),
        "cluster.gateway.http_port: gateway 1 would listen on 8265, the port of Ray's dashboard in the same pod; "
        "write another",
    ),
    "gRPC and HTTP on one port": (
        ("--set", "cluster.gateway.http_port=50051"),
        "cluster.gateway.http_port: is 50051, and gRPC has 1 port(s) from 50051 on; write one that is farther away",
    ),
    "HTTP on the port of the next gateway": (
        ("--set", "mode=kuberay,cluster.gateway.http_port=50052,cluster.gateway.replicas=2"),
        "cluster.gateway.http_port: is 50052, and gRPC has 2 port(s) from 50051 on; write one that is farther away",
    ),
    "a Service with one port twice": (
        ("--set", "cluster.gateway.http_port=8000,gateway.service.port=8000"),
        "gateway.service.port: is 8000, and the Service has 1 port(s) of HTTP from 8000 on "
        "(cluster.gateway.http_port); write one that is farther away",
    ),
    "a Service whose ports overlap": (
        ("--set", "mode=kuberay,cluster.gateway.http_port=444,cluster.gateway.replicas=2,gateway.service.port=443"),
        "gateway.service.port: is 443, and the Service has 2 port(s) of HTTP from 444 on "
        "(cluster.gateway.http_port); write one that is farther away",
    ),
    "two claims for models": (
        ("--set", "model.existingClaim=models,model.pvc.create=true"),
        "model.pvc.create: model.existingClaim names a claim already; write one of the two",
    ),
    "an external Ray without an address": (
        ("--set", "mode=external"),
        "ray.address: mode is external; write HOST:6379 of the Ray to join",
    ),
    "an address for clients of Ray": (
        ("--set", "mode=external,ray.address=ray://ray:10001"),
        "ray.address: pods join that Ray as nodes; write HOST:6379 of its head, with nothing before",
    ),
    "an address for a Ray of our own": (
        ("--set", "ray.address=ray:6379"),
        "ray.address: mode is native, which brings a Ray of its own; write mode: external, or leave the address out",
    ),
    "two tokens": (
        ("--set", "ray.auth.existingSecret=one"),
        "ray.auth: give token or existingSecret, not both",
    ),
    "a token that is not used": (
        ("--set", "ray.auth.mode=disabled"),
        "ray.auth.mode: is disabled, so neither token nor existingSecret has an effect; leave them out",
    ),
    "a key that KubeRay does not read": (
        ("--set", "mode=kuberay,ray.auth.key=token"),
        "ray.auth.key: KubeRay reads auth_token and no other key",
    ),
    "a route without a gateway": (
        ("--set", "grpcRoute.enabled=true"),
        "grpcRoute.parentRefs: is empty; name the Gateway, such as [{name: public}]",
    ),
    "a policy that cuts the gateway off from its Ray": (
        ("--set", "mode=external,ray.address=ray:6379,networkPolicy.enabled=true"),
        "networkPolicy.peers: mode is external; name the pods of that Ray, such as "
        "[{podSelector: {matchLabels: {ray.io/cluster: NAME}}}]",
    ),
    "a policy that lets everybody in by the way of metrics": (
        (
            *("-f", str(values("native-monitored")), "--set", "networkPolicy.enabled=true"),
            *("--set-json", 'networkPolicy.clients=[{"podSelector": {}}]'),
        ),
        "networkPolicy.scrapers: is empty, so with metrics.serviceMonitor everybody could reach the port of HTTP, "
        "which networkPolicy.clients keeps for some; name Prometheus, such as "
        "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]",
    ),
    "a drain longer than the grace": (
        ("--set", "gateway.drainSeconds=110"),
        "gateway.drainSeconds is 110, and 15 s are needed to close; "
        "raise gateway.terminationGracePeriodSeconds above 120",
    ),
    "a pool whose pods have no time to be emptied": (
        ("--set", "pools.decode.terminationGracePeriodSeconds=20"),
        "pools.decode: terminationGracePeriodSeconds is 20, and a pod needs at least 30 to be emptied; raise it",
    ),
    "a pool whose pods have no time at all": (
        ("--set", "pools.decode.terminationGracePeriodSeconds=0"),
        "pools.decode: terminationGracePeriodSeconds is 0, and a pod needs at least 30 to be emptied; raise it",
    ),
    "pods that have no time at all": (
        ("--set", "podDefaults.terminationGracePeriodSeconds=0"),
        "pools.prefill: terminationGracePeriodSeconds is 0, and a pod needs at least 30 to be emptied; raise it",
    ),
    "a gateway that has no time at all": (
        ("--set", "gateway.terminationGracePeriodSeconds=0"),
        "gateway.drainSeconds is 15, and 15 s are needed to close; raise gateway.terminationGracePeriodSeconds above 0",
    ),
    "an autoscaler of gateways that have no pods": (
        ("--set", "mode=kuberay,gateway.autoscaling.enabled=true"),
        "gateway.autoscaling: mode is kuberay, where gateways have no pods of their own; write "
        "cluster.gateway.replicas",
    ),
    "two numbers of gateways": (
        ("--set", "gateway.autoscaling.enabled=true,cluster.gateway.replicas=2"),
        "cluster.gateway.replicas: gateway.autoscaling says how many there are; leave it out",
    ),
    "an autoscaler with its bounds the wrong way round": (
        ("--set", "gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=5"),
        "gateway.autoscaling: minReplicas is 5, above maxReplicas, which is 4",
    ),
    "pods of pools that Ray's autoscaler brings": (
        ("--set", "mode=kuberay,poolAutoscaling.enabled=true", *pools(ELASTIC)),
        "poolAutoscaling: mode is kuberay, where Ray's own autoscaler brings the pods of pools with replicas: "
        "{min, max}; leave it out",
    ),
    "pods of pools that are not the chart's": (
        ("--set", "mode=external,ray.address=a:6379,poolAutoscaling.enabled=true", *pools(ELASTIC)),
        "poolAutoscaling: mode is external, where pools have no pods of the chart; leave it out",
    ),
    "pods of pools that never change": (
        ("--set", "poolAutoscaling.enabled=true", *pools(PREFILL, DECODE, ELASTIC.replace("3", "1"))),
        "poolAutoscaling: no pool may grow or shrink; write replicas: {min: 1, max: 4} in one of cluster.pools",
    ),
    "somebody who has never been heard of": (
        ("--set", "poolAutoscaling.by=me"),
        "- at '/poolAutoscaling/by': value must be one of 'diptych', 'others'",
    ),
    "a pool called as the pod that watches over pools": (
        pools('{"name": "autoscaler", "role": "mixed"}'),
        "cluster.pools: autoscaler is what the chart calls pods of its own; give the pool another name",
    ),
    "a label of the chart's own on all pods": (
        ("--set", r"podDefaults.podLabels.app\.kubernetes\.io/name=mine"),
        "podDefaults.podLabels: app.kubernetes.io/name is the chart's, and tells its pods apart; leave it out",
    ),
    "a label of the chart's own on a pool": (
        ("--set", "pools.decode.podLabels.diptych/pool=prefill"),
        "pools.decode.podLabels: diptych/pool is the chart's, and tells its pods apart; leave it out",
    ),
    "a label of the chart's own on gateways": (
        ("--set", r"gateway.podLabels.app\.kubernetes\.io/component=pool"),
        "gateway.podLabels: app.kubernetes.io/component is the chart's, and tells its pods apart; leave it out",
    ),
    "a name that is no name": (
        ("--set", "fullnameOverride=9lives"),
        "fullnameOverride: 9lives must begin with a letter, and have lower-case letters, digits and dashes",
    ),
    "a name that is too long": (
        (
            "--set",
            f"fullnameOverride={'a' * 36}",
            *pools('{"name": "a-pool-with-a-long-name", "role": "mixed"}'),
        ),
        f"cluster.pools: {'a' * 36}-a-pool-with-a-long-name is too long for a StatefulSet (52); shorten "
        "fullnameOverride or the pool's name",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_are_refused_in_one_line(wrong: str) -> None:
    options, words = WRONG[wrong]
    assert refusal(*TOKEN, *options).endswith(words)


def test_a_token_is_asked_for_rather_than_made_up() -> None:
    assert "ray.auth: Ray needs a token; give existingSecret" in refusal()


def test_the_kubernetes_of_today_is_asked_for() -> None:
    words = refusal("-f", str(values("native")), "--kube-version", "1.26")
    assert "requires kubeVersion: >=1.27-0 which is incompatible with Kubernetes v1.26" in words


def test_ports_of_ray_s_head_are_free_where_gateways_have_pods_of_their_own() -> None:
    objects = rendered(values("native"), "--set", "cluster.gateway.http_port=8265,cluster.gateway.replicas=2")
    assert of_kind(objects, "Deployment")
