"""Wrong values are refused in one line that names the key."""

import pytest

from tests.helm.chart import TOKEN, of_kind, refusal, rendered, values


def pools(*described: str) -> tuple[str, str]:
    return "--set-json", f"cluster.pools=[{','.join(described)}]"


PREFILL = '{"name": "prefill", "role": "prefill"}'
DECODE = '{"name": "decode", "role": "decode"}'
ELASTIC = '{"name": "both", "role": "mixed", "replicas": {"min": 1, "max": 3}}'
WRONG = {
    "a misspelled key": (("--set", "cluster.modle=x"), "- at '/cluster': additional properties 'modle' not allowed"),
    "a misspelled key of a pool": (
        pools('{"name": "both", "role": "mixed", "replica": 2}'),
        "- at '/cluster/pools/0': additional properties 'replica' not allowed",
    ),
    "a misspelled pod setting": (
        ("--set", "pools.decode.nodeselector.a=b"),
        "- at '/pools/decode': additional properties 'nodeselector' not allowed",
    ),
    "an unknown mode": (("--set", "mode=nativ"), "- at '/mode': value must be one of 'native', 'kuberay', 'external'"),
    "a word for a number": (
        ("--set", "cluster.gateway.max_requests=many"),
        "- at '/cluster/gateway/max_requests': got string, want integer",
    ),
    "a size that is none": (
        pools('{"name": "both", "role": "mixed", "cache": {"host": "8 gigs"}}'),
        "- at '/cluster/pools/0/cache/host': '8 gigs' does not match pattern "
        "'^[0-9]+([.][0-9]+)? ?([KMGTkmgt]i?)?[Bb]?$'",
    ),
    "a floor above the pools": (
        ("--set", "cluster.elastic.mode=act,cluster.elastic.floors.decode=3"),
        "cluster.elastic.floors.decode is 3, the pools have 2 workers; lower the floor",
    ),
    "settings of an unknown pool": (
        ("--set", "pools.prefil.shmSize=1Gi"),
        "pools.prefil: cluster.pools has no such pool, only prefill, decode",
    ),
    "no decode pool": (
        pools(PREFILL),
        "cluster.pools: there is no decode pool (and no mixed one), so no request could finish",
    ),
    "two pools with one name": (
        pools(PREFILL, DECODE, DECODE),
        "cluster.pools: two are called decode; names must differ",
    ),
    "a pool named like the head": (
        pools('{"name": "head", "role": "mixed"}'),
        "cluster.pools: the chart's own pods use the name head; give the pool another name",
    ),
    "no workers": (
        pools('{"name": "both", "role": "mixed", "replicas": 0}'),
        "cluster.pools: no pool has a worker; give one at least 1 replica",
    ),
    "min above max": (
        pools('{"name": "both", "role": "mixed", "replicas": {"min": 3, "max": 1}}'),
        "cluster.pools: both has replicas.min above replicas.max",
    ),
    "an unreachable gateway": (
        ("--set", "cluster.gateway.host=127.0.0.1"),
        "cluster.gateway.host: the gateway would be unreachable from outside the pod; write 0.0.0.0",
    ),
    "a ServiceMonitor without HTTP": (
        ("--set", "metrics.serviceMonitor.enabled=true"),
        "metrics.serviceMonitor: gateways serve metrics over HTTP; write cluster.gateway.http_port: 8000",
    ),
    "a random port": (
        ("--set", "cluster.gateway.grpc_port=0"),
        "cluster.gateway.grpc_port: a Service needs a fixed port; write 50051",
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
    "two model claims": (
        ("--set", "model.existingClaim=models,model.pvc.create=true"),
        "model.pvc.create: model.existingClaim already names a claim; write one of the two",
    ),
    "external Ray without an address": (
        ("--set", "mode=external"),
        "ray.address: mode is external; write HOST:6379 of the Ray to join",
    ),
    "a Ray client address": (
        ("--set", "mode=external,ray.address=ray://ray:10001"),
        "ray.address: pods join that Ray as nodes; write HOST:6379 of its head, without a scheme",
    ),
    "an address in mode native": (
        ("--set", "ray.address=ray:6379"),
        "ray.address: mode is native, which starts its own Ray; write mode: external, or leave the address out",
    ),
    "two tokens": (
        ("--set", "ray.auth.existingSecret=one"),
        "ray.auth: give token or existingSecret, not both",
    ),
    "an unused token": (
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
    "a network policy without the external Ray": (
        ("--set", "mode=external,ray.address=ray:6379,networkPolicy.enabled=true"),
        "networkPolicy.peers: mode is external; name the pods of that Ray, such as "
        "[{podSelector: {matchLabels: {ray.io/cluster: NAME}}}]",
    ),
    "a network policy that metrics would open": (
        (
            *("-f", str(values("native-monitored")), "--set", "networkPolicy.enabled=true"),
            *("--set-json", 'networkPolicy.clients=[{"podSelector": {}}]'),
        ),
        "networkPolicy.scrapers: is empty, so metrics.serviceMonitor would open the HTTP port to all, although "
        "networkPolicy.clients restricts it; name Prometheus, such as "
        "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]",
    ),
    "a drain longer than the grace period": (
        ("--set", "gateway.drainSeconds=110"),
        "gateway.drainSeconds is 110, and 15 s are needed to close; "
        "raise gateway.terminationGracePeriodSeconds above 120",
    ),
    "a pool with too little time to drain": (
        ("--set", "pools.decode.terminationGracePeriodSeconds=20"),
        "pools.decode: terminationGracePeriodSeconds is 20, and draining a pod takes at least 30; raise it",
    ),
    "a pool with no time to drain": (
        ("--set", "pools.decode.terminationGracePeriodSeconds=0"),
        "pools.decode: terminationGracePeriodSeconds is 0, and draining a pod takes at least 30; raise it",
    ),
    "pods with no time to drain": (
        ("--set", "podDefaults.terminationGracePeriodSeconds=0"),
        "pools.prefill: terminationGracePeriodSeconds is 0, and draining a pod takes at least 30; raise it",
    ),
    "a gateway with no time to drain": (
        ("--set", "gateway.terminationGracePeriodSeconds=0"),
        "gateway.drainSeconds is 15, and 15 s are needed to close; raise gateway.terminationGracePeriodSeconds above 0",
    ),
    "gateway autoscaling in mode kuberay": (
        ("--set", "mode=kuberay,gateway.autoscaling.enabled=true"),
        "gateway.autoscaling: mode is kuberay, where gateways have no pods of their own; write "
        "cluster.gateway.replicas",
    ),
    "replicas beside autoscaling": (
        ("--set", "gateway.autoscaling.enabled=true,cluster.gateway.replicas=2"),
        "cluster.gateway.replicas: gateway.autoscaling sets the number; leave it out",
    ),
    "minReplicas above maxReplicas": (
        ("--set", "gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=5"),
        "gateway.autoscaling: minReplicas is 5, above maxReplicas, which is 4",
    ),
    "pool autoscaling in mode kuberay": (
        ("--set", "mode=kuberay,poolAutoscaling.enabled=true", *pools(ELASTIC)),
        "poolAutoscaling: mode is kuberay, where Ray's autoscaler adds the pods of pools with replicas: "
        "{min, max}; leave it out",
    ),
    "pool autoscaling in mode external": (
        ("--set", "mode=external,ray.address=a:6379,poolAutoscaling.enabled=true", *pools(ELASTIC)),
        "poolAutoscaling: mode is external, where pools have no pods of the chart; leave it out",
    ),
    "pool autoscaling without a scalable pool": (
        ("--set", "poolAutoscaling.enabled=true", *pools(PREFILL, DECODE, ELASTIC.replace("3", "1"))),
        "poolAutoscaling: no pool can scale; write replicas: {min: 1, max: 4} in one of cluster.pools",
    ),
    "an unknown autoscaler": (
        ("--set", "poolAutoscaling.by=me"),
        "- at '/poolAutoscaling/by': value must be one of 'diptych', 'others'",
    ),
    "a pool named like the autoscaler": (
        pools('{"name": "autoscaler", "role": "mixed"}'),
        "cluster.pools: the chart's own pods use the name autoscaler; give the pool another name",
    ),
    "a selector label on all pods": (
        ("--set", r"podDefaults.podLabels.app\.kubernetes\.io/name=mine"),
        "podDefaults.podLabels: the chart selects its pods by app.kubernetes.io/name; leave it out",
    ),
    "a selector label on a pool": (
        ("--set", "pools.decode.podLabels.diptych/pool=prefill"),
        "pools.decode.podLabels: the chart selects its pods by diptych/pool; leave it out",
    ),
    "a selector label on gateways": (
        ("--set", r"gateway.podLabels.app\.kubernetes\.io/component=pool"),
        "gateway.podLabels: the chart selects its pods by app.kubernetes.io/component; leave it out",
    ),
    "an invalid name": (
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
    options, message = WRONG[wrong]
    assert refusal(*TOKEN, *options).endswith(message)


def test_a_token_is_required() -> None:
    assert "ray.auth: Ray needs a token; give existingSecret" in refusal()


def test_an_old_kubernetes_is_refused() -> None:
    message = refusal("-f", str(values("native")), "--kube-version", "1.26")
    assert "requires kubeVersion: >=1.27-0 which is incompatible with Kubernetes v1.26" in message


def test_gateways_in_their_own_pods_may_use_ports_of_the_head() -> None:
    objects = rendered(values("native"), "--set", "cluster.gateway.http_port=8265,cluster.gateway.replicas=2")
    assert of_kind(objects, "Deployment")
