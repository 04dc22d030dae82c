"""The containers of a guarded release, run with the commands that the chart renders: its own get in, others do not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chart import Object, of_kind, rendered, values
from pod_processes import CONFIG, PodProcesses, pod_processes, why_not

from tests.http.certificates import Authority
from workers.errors import ModelError
from workers.model.store import resolve

SLOW = pytest.mark.skipif(not os.environ.get("DIPTYCH_PODS"), reason="takes minutes: make pods")
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600), SLOW]

HEAD, GATEWAY, HOST = "release-diptych-head", "release-diptych-gateway", "release-diptych.llm.svc"
READY_S, END_S = 200.0, 60.0
KEY = "a-key-that-is-long-enough"
# As the kubelet asks: it looks at no certificate.
PROBE = """
import ssl, urllib.request
print(urllib.request.urlopen({!r}, timeout=5, context=ssl._create_unverified_context()).status)
"""


def write_secrets(folder: Path) -> None:
    """Where the volumes of the release are mounted, in the words of `pod_processes`."""
    for name in ("tls", "ca", "keys"):
        Path(f"{folder}-{name}").mkdir()
    authority = Authority(folder, "servers")
    pair = authority.sign("server", HOST)
    Path(f"{folder}-tls/tls.crt").write_bytes(pair.cert.read_bytes())
    Path(f"{folder}-tls/tls.key").write_bytes(pair.key.read_bytes())
    Path(f"{folder}-ca/ca.crt").write_bytes(authority.ca.read_bytes())
    Path(f"{folder}-keys/keys").write_text(KEY + "\n")


def with_secrets(container: Object, folder: Path, **changed: str) -> Object:
    """Its environment names the files that there are."""
    env = [
        each if "value" not in each else each | {"value": each["value"].replace(CONFIG, str(folder))}
        for each in container["env"]
    ]
    return container | {"env": [each | {"value": changed.get(each["name"], each.get("value"))} for each in env]}


def answer(pods: PodProcesses, url: str) -> str:
    ask = ["ip", "netns", "exec", pods.namespace(HEAD), sys.executable, "-c", PROBE.format(url)]
    done = subprocess.run(ask, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_smoke_test_and_the_probes_get_in_and_a_stranger_does_not(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"pods as processes: {reason}")
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    folder = tmp_path / "etc"
    folder.mkdir()
    write_secrets(folder)
    objects = rendered(values("native-guarded"), "--set", "cluster.health.dead_after_s=20")
    (smoke,) = of_kind(objects, "Pod")
    with pod_processes(objects, folder, {HEAD: HEAD, HOST: GATEWAY}) as pods:
        started = {name: pods.start(name, spec["containers"][0]) for name, spec in pods.specs.items() if name == HEAD}
        others = [name for name in pods.specs if name != HEAD]
        waiting = [pods.start(name, pods.specs[name]["initContainers"][0]) for name in others]
        assert [each.wait(READY_S) for each in waiting] == [0] * len(others)
        started |= {name: pods.start(name, pods.specs[name]["containers"][0]) for name in others}
        gateway = pods.specs[GATEWAY]["containers"][0]
        log, deadline = pods.log(GATEWAY, gateway), time.monotonic() + READY_S
        while "ready: https" not in (said := log.read_text()):
            assert time.monotonic() < deadline and "Error" not in said, said
            time.sleep(0.5)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = gateway[probe]["httpGet"]
            assert answer(pods, f"https://{pods.addresses[GATEWAY]}:{asked['port']}{asked['path']}") == "200"
        assert "401" in answer(pods, f"https://{pods.addresses[GATEWAY]}:8000/metrics")
        asking = with_secrets(smoke["spec"]["containers"][0], folder)
        assert pods.start(HEAD, asking).wait(READY_S) == 0, pods.log(HEAD, asking).read_text()
        Path(f"{folder}-keys/keys.other").write_text("another-key-of-this-length\n")
        stranger = with_secrets(asking, folder, DIPTYCH_KEY_FILE=f"{folder}-keys/keys.other")
        assert pods.start(HEAD, stranger).wait(READY_S) != 0
        assert "this API key is none that the gateway knows" in pods.log(HEAD, stranger).read_text()
        started[GATEWAY].send_signal(signal.SIGTERM)
        assert started[GATEWAY].wait(END_S) == 0
        assert log.read_text().endswith("closed\n")
