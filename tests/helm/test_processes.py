"""The containers of the native mode, run with the commands that the chart renders, become a cluster that answers."""

import os
import signal
import time
from pathlib import Path

import pytest
from chart import Object, of_kind, rendered, values
from pod_processes import PodProcesses, pod_processes, why_not

from workers.errors import ModelError
from workers.model.store import resolve

SLOW = pytest.mark.skipif(not os.environ.get("DIPTYCH_PODS"), reason="takes minutes: make pods")
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600), SLOW]

HEAD, GATEWAY = "release-diptych-head", "release-diptych-gateway"
READY_S, END_S = 200.0, 60.0
# The model is in the cache of this machine, and two cores serve all pods.
OPTIONS = ("--set", "cluster.health.dead_after_s=20")


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return str(resolve("smollm2-135m").path)
    except ModelError as error:
        pytest.skip(f"the model cannot be had here: {error}")


def main(pods: PodProcesses, name: str) -> Object:
    container: Object = pods.specs[name]["containers"][0]
    return container


def wait_ready(pods: PodProcesses) -> str:
    log, deadline = pods.log(GATEWAY, main(pods, GATEWAY)), time.monotonic() + READY_S
    while "ready: grpc" not in (said := log.read_text()):
        assert time.monotonic() < deadline and "Error" not in said, said
        time.sleep(0.5)
    return said


def test_pods_find_each_other_and_the_smoke_test_gets_its_tokens(tmp_path: Path, model: str) -> None:
    if reason := why_not():
        pytest.skip(f"pods as processes: {reason}")
    objects = rendered(values("native"), *OPTIONS)
    (smoke,) = of_kind(objects, "Pod")
    with pod_processes(objects, tmp_path, {HEAD: HEAD, "release-diptych": GATEWAY}) as pods:
        others = [name for name in pods.specs if name != HEAD]
        pods.start(HEAD, main(pods, HEAD))
        waiting = [pods.start(name, pods.specs[name]["initContainers"][0]) for name in others]
        assert [each.wait(READY_S) for each in waiting] == [0] * len(others)
        started = {name: pods.start(name, main(pods, name)) for name in others}
        wait_ready(pods)
        for name in pods.specs:
            container = main(pods, name)
            if "httpGet" in container["livenessProbe"]:
                probe = container["livenessProbe"]["httpGet"]
                port = {each["name"]: each["containerPort"] for each in container["ports"]}[probe["port"]]
                assert pods.status(HEAD, f"http://{pods.addresses[name]}:{port}{probe['path']}") == "200"
            assert pods.status(HEAD, f"http://{pods.addresses[name]}:8080/metrics") == "200"
        asking = smoke["spec"]["containers"][0]
        assert pods.start(HEAD, asking).wait(READY_S) == 0, pods.log(HEAD, asking).read_text()
        said = pods.log(HEAD, asking).read_text()
        assert "prefill-0" in said and "decode-0" in said
        started[GATEWAY].send_signal(signal.SIGTERM)
        assert started[GATEWAY].wait(END_S) == 0
        assert pods.log(GATEWAY, main(pods, GATEWAY)).read_text().endswith("closed\n")
