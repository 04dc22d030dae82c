"""Pods that follow workers, as real processes: one comes for a worker, and goes under streams that lose no token."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.helm.chart import CHART, values
from tests.helm.pod_network import why_not
from tests.helm.test_processes import ENDPOINT, PROMPTS, WAIT_S, Release, alone, installed, requests

SLOW = pytest.mark.skipif(not os.environ.get("DIPTYCH_PODS"), reason="takes minutes: make pods")
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900), SLOW]

TOKENS = 160  # longer than it takes a pod to go
POOLS = [
    {"name": "prefill", "role": "prefill", "resources": {"cpu": 1, "labels": {"pool": "prefill"}}},
    {
        "name": "decode",
        "role": "decode",
        "replicas": {"min": 1, "max": 2},
        "resources": {"cpu": 1, "labels": {"pool": "decode"}},
    },
]
OPTIONS = (
    *("-f", str(values("native")), "--set-json", f"cluster.pools={json.dumps(POOLS)}"),
    *("--set", "cluster.health.dead_after_s=20,gateway.drainSeconds=3"),
    *("--set-string", "cluster.elastic.mode=off"),  # the test scales
    *("--set", "poolAutoscaling.enabled=true,poolAutoscaling.stabilizationWindowSeconds=5"),
)
ONE, BOTH = ["release-diptych-decode-0"], ["release-diptych-decode-0", "release-diptych-decode-1"]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    if reason := why_not():
        pytest.skip(f"pods as processes: {reason}")
    with installed(alone(PROMPTS[:2], TOKENS), tmp_path_factory.mktemp("pods"), OPTIONS) as there:
        yield there


def diptych(release: Release, *arguments: str) -> str:
    return release.ask(sys.executable, "-m", "cluster.cli", *arguments, "--endpoint", ENDPOINT)


def decoding(release: Release) -> list[str]:
    """Pods of the pool that are there, those that end among them."""
    return sorted(each.name for each in release.kubelet.pods_of("pool") if "-decode-" in each.name)


def nodes(release: Release) -> dict[str, str]:
    """Where the workers are that decode and are ready."""
    workers = json.loads(diptych(release, "status", "--json"))["workers"]
    return {each["name"]: each["node"] for each in workers if each["pool"] == "decode" and each["state"] == "ready"}


def until(release: Release, is_so: Callable[[], bool]) -> float:
    begun_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun_s < WAIT_S and release.kubelet.failure is None, release.told()
        time.sleep(0.2)
    return time.monotonic() - begun_s


def said(release: Release) -> list[str]:
    """By the autoscaler when it scaled."""
    logs = release.kubelet.folder.glob("release-diptych-autoscaler/*/autoscaler.log")
    return [line for each in sorted(logs) for line in each.read_text().splitlines() if "scaling release-" in line]


def test_a_pod_comes_for_a_worker_and_goes_under_streams(release: Release) -> None:
    assert decoding(release) == ONE and said(release) == []
    diptych(release, "scale", "decode", "2")
    there_s = until(release, lambda: len(nodes(release)) == 2)
    assert decoding(release) == BOTH
    assert nodes(release) == dict(zip(("decode-0", "decode-1"), BOTH, strict=True))
    (last,) = [each for each in release.kubelet.pods_of("pool") if each.name == BOTH[1]]
    with requests(release, 2, PROMPTS[:2], TOKENS) as asked:
        time.sleep(5)
        diptych(release, "drain", "decode-0")  # so that the one that stays is on the pod that goes
        gone_s = until(release, lambda: decoding(release) == ONE)
        time.sleep(2)
    received = asked.check(release.exact, 2)
    ((code, words),) = last.hooks
    assert code == 0 and "is empty after" in words and "diptych/decode-1 left it" in words
    assert not last.killed
    until(release, lambda: list(nodes(release).values()) == ONE)  # the worker starts again on the pod that stays
    up, down = said(release)
    assert "scaling release-diptych-decode from 1 to 2 pods: target is 2 workers" in up
    assert "scaling release-diptych-decode from 2 to 1 pods: the pool has had no more than 1 workers for" in down
    print(f"the second worker was ready after {there_s:.0f} s; its pod had gone after {gone_s:.0f} s under {received}")


def test_an_upgrade_leaves_as_many_pods_as_there_are(release: Release) -> None:
    diptych(release, "scale", "decode", "2")
    until(release, lambda: len(nodes(release)) == 2)
    waiting = ("--wait", "--timeout", f"{WAIT_S:.0f}s")
    release.helm("upgrade", "release", CHART, "--reuse-values", "--set", "gateway.podAnnotations.round=two", *waiting)
    assert decoding(release) == BOTH
    diptych(release, "scale", "decode", "1")
    until(release, lambda: decoding(release) == ONE)
    assert len(nodes(release)) == 1
